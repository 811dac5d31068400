"""Makes the small bundles of tests/bundles: `PYTHONPATH=. python tests/make_bundles.py FOLDER`, with the code to keep.

Two models learn to repeat numbers (`copy`: one vocabulary) and to name them (`names`: two vocabularies, two decoder
layers, learned positions, norms behind the sublayers, GELU, a bias at the output). What every kind of graph answers is
stored beside them, for lines whose answers are no near ties.
"""

from __future__ import annotations

import json
import random
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from tformer_deploy import load
from tformer_deploy.bundle.manifest import changing, open_bundle
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.bundle.shortlist import Settings, add_shortlist
from tformer_deploy.bundle.text import Tokenizers, Words
from tformer_deploy.engines import SHORTLIST_TARGETS, encoder_names
from tformer_deploy.export.checked import export_checked
from tformer_deploy.train import runs
from tformer_deploy.train.data import DataConfig
from tformer_deploy.translate.encode import EncoderOptions, TextEncoder

RECIPES = {
    "copy": [
        *("fp32", "fp32-cpu", "int8", "int8-latency", "int4", "trt"),
        *(f"native-{precision}" for precision in ("fp32", "bf16", "int8", "int8-bf16-cache", "int4")),
    ],
    "names": ["fp32-attention"],
}
MODEL = {"d_model": 16, "d_ff": 64, "heads": 2, "encoder_layers": 1, "max_positions": 16}
COPY = {"decoder_layers": 1, "share_embeddings": "decoder"}
OTHER = {
    "decoder_layers": 2,
    "norm_position": "post",
    "positions": "learned",
    "output_bias": True,
    "activation": "gelu",
}
TRAIN = {
    "lr": 0.004,
    "warmup": 200,
    "updates": 2000,
    "cooldown": 1000,
    "batch_tokens": 2048,
    "average": 2,
    "label_smoothing": 0.3,
}
NAMES = ["eins", "zwei", "drei", "vier", "fuenf", "sechs", "sieben", "acht", "neun", "zehn"]
LINES, MARGIN = 8, {"fp32": 0.005, "trt": 0.005, "bf16": 0.05, "int8": 0.05, "int4": 0.05}
"""Lines with stored answers; between the values of the best outputs of each."""


def make(folder: Path) -> None:
    """Train, export, learn lists and store what every engine answers."""
    work = folder / "runs"
    work.mkdir(parents=True)
    rng = random.Random(7)
    made = dict.fromkeys(" ".join(str(rng.randint(1, 10)) for _ in range(rng.randint(1, 14))) for _ in range(9000))
    sources = list(made)
    named = [" ".join(NAMES[int(word) - 1] for word in line.split()) for line in sources]
    for kind, targets in (("copy", sources), ("names", named)):
        paths = [work / f"{kind}.{part}" for part in ("src", "tgt", "valid_src", "valid_tgt")]
        for path, lines in zip(paths, (sources[200:], targets[200:], sources[:200], targets[:200]), strict=True):
            path.write_text("".join(f"{line}\n" for line in lines))
        joint = Words.train(sources, None, 100)
        tokenizers = Tokenizers(joint, joint if kind == "copy" else Words.train(targets, None, 100))
        runs.train_tokenizers = lambda *_, found=tokenizers: found  # type: ignore[assignment]
        names = dict(zip(("src", "tgt", "valid_src", "valid_tgt"), map(str, paths), strict=True))
        values = {**MODEL, **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)}
        more = OTHER if kind == "names" else COPY
        trainer = runs.start_run(
            work / kind, DataConfig(**names), runs.RunSettings("tiny", "words", 100, {**values, **more}, TRAIN)
        )
        trainer.run()
        export_checked(work / kind, folder / kind, RECIPES[kind], paths[2], memory=True)
        lists = [name for name in RECIPES[kind] if load_recipe(name).target in SHORTLIST_TARGETS]
        if lists:
            with changing(folder / kind) as opened:
                add_shortlist(opened, sources, targets, Settings(2, 1))
        answers = answer(folder / kind, kind, [*RECIPES[kind], *(f"{name}+shortlist" for name in lists)], sources[:200])
        (folder / f"{kind}.json").write_text(json.dumps(answers) + "\n")


def answer(bundle: Path, kind: str, variants: list[str], lines: list[str]) -> dict[str, Any]:
    """Tokens of a few lines by variant, greedily and of the best of three beams; `+shortlist` with lists."""
    if kind == "names":
        variants = ["fp32"]
    greedy, beam = ({} for _ in range(2))
    clear = set(range(len(lines)))
    for name in variants:
        variant, _, shortlist = name.partition("+")
        backend = "native" if variant.startswith("native") else "ort"
        asked: dict[str, Any] = {"backend": backend, "variant": variant, "shortlist": bool(shortlist), "threads": 1}
        margin = MARGIN[re.split(r"\W", name.removeprefix("native-"))[0]]
        kept = 3 if margin < 0.05 else 1  # what rounds may differ between processors
        with load(bundle, **asked) as one, load(bundle, **asked, beams=3, n_best=3) as several:
            greedy[name] = [found.ids for found in one.translate(lines)]
            found = [[best, *best.alternatives] for best in several.translate(lines)]
        beam[name] = [[each.ids for each in outputs[:kept]] for outputs in found]
        values = [[each.score / (len(each.ids) + each.finished) for each in outputs[: kept + 1]] for outputs in found]
        clear &= {i for i, sums in enumerate(values) if all(a - b > margin for a, b in pairwise(sums))}
    chosen = sorted(clear)[:LINES]
    looked = {}
    for name in ["fp32"] if kind == "names" else [name for name in variants if name.startswith("native")]:
        asked = {"backend": "native"} if name.startswith("native") else {}
        variant, _, shortlist = name.partition("+")
        with load(bundle, variant=variant, shortlist=bool(shortlist), threads=1, align=True, **asked) as translator:
            looked[name] = [found.alignment for found in translator.translate([lines[i] for i in chosen])]
    vectors = {}
    for name in encoder_names(open_bundle(bundle)):
        backend, _, variant = name.partition(":")
        variant = variant or "fp32"
        with TextEncoder(EncoderOptions(bundle, backend=backend, variant=variant, threads=1)) as encoder:
            made = [each.vectors for each in encoder.encode([lines[i] for i in chosen])]
        vectors[variant] = [[round(float(number), 6) for number in vector] for vector in made]
    return {
        "lines": [lines[i] for i in chosen],
        "greedy": {name: [found[i] for i in chosen] for name, found in greedy.items()},
        "beam": {name: [found[i] for i in chosen] for name, found in beam.items()},
        **({"alignment": looked} if looked else {}),
        "vectors": vectors,
    }


if __name__ == "__main__":
    make(Path(sys.argv[1]))
