"""What the host decodes: a trained bundle, and one of random weights that the host makes; each with eager's answers."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import onnx

from benchmarks.peers.points import random_sources
from tformer_deploy.base.errors import ArtifactError, DataError
from tformer_deploy.base.files import write_json
from tformer_deploy.base.lines import read_lines
from tformer_deploy.bundle.contract import GRAPHS, WEIGHTS
from tformer_deploy.bundle.manifest import MANIFEST, Bundle, Exported, hashes, open_bundle, write_manifest
from tformer_deploy.bundle.plans import Profile, trt_variant
from tformer_deploy.bundle.recipe import narrowest
from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words
from tformer_deploy.check import CheckOptions, Gate, make_corpus, translations
from tformer_deploy.check.gate import machine
from tformer_deploy.check.reference import make_reference
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.checked import choose
from tformer_deploy.export.save import weights_read
from tformer_deploy.export.to_onnx import export_graphs
from tformer_deploy.export.trace import Tracer
from tformer_deploy.model.config import ModelConfig, preset
from tformer_deploy.model.network import Transformer

from .seeded import LISTED, fill
from .twin import eager_twin

BEAMS = 5
PADDING = 16
"""Columns that the check of invariance adds."""
BATCHES = (1, 8, 32, 128)
BASE_BEAMS = (1, 4)
BASE_LENGTHS = 20, 32
"""Source and new tokens of what is measured on the random bundle, and of its plans."""
PROBE = "tiny", 1000
"""Preset and vocabulary of the model of the probe."""
LINES = 72
"""Of the random bundle's text: the check, whose batches they fill as they do, takes plans of every size."""


class Model:
    """A model in the kit's folder: `<name>/` is its bundle, `<name>.<what>` what belongs to it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.bundle = folder, name, folder / name
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, what: str) -> Path:
        """Text, reference or options."""
        return self.folder / f"{self.name}.{what}"

    def write_text(self, what: str, lines: Iterable[str]) -> None:
        """`text` is checked, and half precision calibrated with it; `tgt` is its translation."""
        self.file(what).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def write_options(self, profiles: Iterable[Profile], batches: Sequence[int], beams: Sequence[int]) -> None:
        """Words for `tformer build`, and for `tformer bench` in the stages that measure, one a line.

        `beams`: of a greedy search and others; what is measured has the sizes of the first profile.
        """
        profiles = list(profiles)
        rest: list[object] = ["--src-len", min(BASE_LENGTHS[0], profiles[0].src_len)]
        rest += ["--new-tokens", min(BASE_LENGTHS[1], profiles[0].capacity)]
        words: dict[str, list[object]] = {"build": [word for profile in profiles for word in ("--profile", profile)]}
        for stage, points in measured(batches, beams).items():
            lists = [",".join(map(str, numbers)) for numbers in points]
            words[stage] = ["--batch", lists[0], "--beam", lists[1], *rest]
        for what, options in words.items():
            self.file(what).write_text("".join(f"{word}\n" for word in options))


def add_trained(
    folder: Path, source: Path, checkpoint: Path | None, texts: tuple[Path, Path | None], sentences: int
) -> int:
    """Copy what TensorRT needs of a bundle, and write down what eager PyTorch makes of the first lines of a text.

    The second text, if there is one, is its translation. Returns how many lines that are.
    """
    model, bundle = Model(folder, "trained"), open_bundle(source)
    copy_bundle(bundle, model.bundle)
    lines = list(islice((line for line in read_lines(texts[0]) if line), sentences))
    if not lines:
        raise DataError(f"{texts[0]}: no line with text")
    model.write_text("text", lines)
    source, target = texts
    if target:
        model.write_text("tgt", translations(source, target)[: len(lines)])
    copied = open_bundle(model.bundle)
    recipe = narrowest([copied.recipe, *copied.variants.values()])
    corpus = make_corpus(copied.config, recipe, copied.tokenizers(), model.file("text"))
    longest, axes = max(map(len, corpus.sources)), copied.variants[trt_variant(copied)].axes
    source_size = min(up(longest + PADDING), axes.src_len.max)
    target_size = min(up(2 * longest), axes.past_len.max + 1)
    options = CheckOptions(max_tokens=target_size, positions=target_size, beams=min(BEAMS, axes.beams.max))
    corpus.options = replace(options, n_best=options.beams, invariance=min(options.invariance, len(lines)))
    Gate(bundle, checkpoint).reference(corpus).save(model.file("reference"))
    searches, batches = (1, options.beams), (1, 32)
    profiles = [Profile(batch, beams, source_size, target_size) for beams in searches for batch in batches]
    model.write_options(profiles, batches, searches)
    return len(lines)


def add_random(folder: Path, preset_name: str, vocabulary: int, seed: int) -> int:
    """The model that speed is measured on, with eager's answers to a text. Returns how many lines are checked."""
    model = Model(folder, "base")
    config, ids = export_random(model, preset_name, vocabulary, seed)
    source, target = sizes_of(config)
    options = CheckOptions(target, max(BASE_BEAMS), max(BASE_BEAMS), invariance=BATCHES[1], positions=target, wide=0)
    about = {"corpus": model.file("text").name, "weights_sha256": digest(preset_name, vocabulary, seed)}
    with EagerEngine(eager_twin(model.bundle / trt_variant(open_bundle(model.bundle)), config)) as eager:
        make_reference(eager, ids, options, {**about, "machine": machine()}).save(model.file("reference"))
    leave_weights(model.bundle)
    profiles = [Profile(batch, beams, source, target) for beams in BASE_BEAMS for batch in BATCHES]
    model.write_options(profiles, BATCHES, BASE_BEAMS)
    write_json(model.file("points"), {
        "model": {"preset": preset_name, "vocabulary": vocabulary}, "batch": BATCHES, "beams": BASE_BEAMS,
        "src_len": source, "new_tokens": target,
    })  # fmt: skip
    return LINES


def add_probe(folder: Path, seed: int) -> None:
    """A model that shows in a minute whether a host runs plans at all."""
    model = Model(folder, "probe")
    config, _ = export_random(model, *PROBE, seed)
    leave_weights(model.bundle)
    model.write_options([Profile(1, 1, *sizes_of(config))], (1,), (1,))


def export_random(model: Model, preset_name: str, vocabulary: int, seed: int) -> tuple[ModelConfig, list[list[int]]]:
    """Export a preset with the weights that the host makes from the seed, and a text. Returns the text's ids too."""
    # Every constant is random for itself, so nothing is tied.
    config = replace(preset(preset_name, vocabulary, vocabulary), share_embeddings="none", positions="learned")
    words = Words([*SPECIALS, *(f"w{i}" for i in range(len(SPECIALS), vocabulary))], None)
    identity = digest(preset_name, vocabulary, seed)
    recipes = choose(["fp32", "trt"], config)
    model.bundle.mkdir()
    module, description = Transformer(config).init_weights(seed), Tokenizers(words, words).save(model.bundle)
    for name, recipe in recipes.items():
        export_graphs(Tracer(module), recipe, model.bundle / name, identity)
    drop_weights(model.bundle, recipes, seed)
    checkpoint = {"path": "none: the weights are random", "weights_sha256": identity}
    exported = Exported(config, description, checkpoint, weights=weights_read(model.bundle))
    write_manifest(model.bundle, recipes, exported)
    lengths = [4 + i % (sizes_of(config)[0] - 3) for i in range(LINES)]
    ids = random_sources(vocabulary, lengths, seed)
    model.write_text("text", (" ".join(f"w{i}" for i in each[:-1]) for each in ids))
    return config, ids


def digest(preset_name: str, vocabulary: int, seed: int) -> str:
    """The hash that stands for random weights: of what they are made from."""
    return hashlib.sha256(f"{preset_name} {vocabulary} {seed}".encode()).hexdigest()


def sizes_of(config: ModelConfig) -> tuple[int, int]:
    """Source and new tokens of what is measured on random weights."""
    source, target = (min(size, config.max_positions) for size in BASE_LENGTHS)
    return source, target


def leave_weights(bundle: Path) -> None:
    """Delete the files that the host makes itself."""
    for name in json.loads((bundle / LISTED).read_text()):
        (bundle / name).unlink()


def drop_weights(bundle: Path, folders: Iterable[str], seed: int) -> None:
    """Fill every file of weights from the seed, and list it in the bundle. Raises ArtifactError where it may not be."""
    listed = {}
    for number, folder in enumerate(folders):
        for graph in GRAPHS:
            check_floats(bundle / folder / f"{graph}.onnx")
        path = bundle / folder / WEIGHTS
        size, own = path.stat().st_size, seed + number
        name = path.relative_to(bundle).as_posix()
        listed[name] = {"size": size, "seed": own, "sha256": fill(path, size, own)}
    (bundle / LISTED).write_text(json.dumps(listed, indent=1) + "\n")


def check_floats(graph: Path) -> None:
    """All that a graph keeps in the file of weights must be fp32."""
    for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL and tensor.data_type != onnx.TensorProto.FLOAT:
            raise ArtifactError(f"{graph}: {tensor.name} is not fp32: random weights would break it: keep it small")


def copy_bundle(bundle: Bundle, out: Path) -> None:
    """Without plans, and of all variants the one for TensorRT."""
    variant, manifest = trt_variant(bundle), json.loads((bundle.directory / MANIFEST).read_text(encoding="utf-8"))
    dropped = set(manifest["variants"]) - {variant}
    for name in manifest["files"]:
        if Path(name).parts[0] not in dropped and "plans" not in Path(name).parts:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.directory / name, out / name)
    manifest["variants"] = {variant: manifest["variants"][variant]}
    write_json(out / MANIFEST, {**manifest, "default": "", "files": hashes(out)})


def measured(batches: Sequence[int], beams: Sequence[int]) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
    """Stage -> the batches and beams that it measures: what says most comes first."""
    return {"steps": (batches[:1], beams[:1]), "batches": (batches[1:], beams[:1]), "beams": (batches, beams[1:])}


def up(size: int) -> int:
    """The next multiple of 8."""
    return -(-size // 8) * 8
