"""Models of Marian: model.npz with its settings, vocabularies, decoder.yml for marian-decoder. `importers.marian` back.

Marian computes positions itself, and its decoder starts from zeros: it can say models that came from Marian, and others
that have these. A position table of its own (`transformer-train-positions`) is no way out: its decoder reads row 0 at
every step. Nor can it say pre-norm layers: from the second step on, its decoder attends to what is not normalized.
Source: marian-dev, src/models/transformer.h; its search: src/translator/beam_search.cpp.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.errors import ArtifactError, MissingExtra
from ...bundle.text import Tokenizer, Tokenizers
from ...decoding import DecodeOptions
from ...importers.marian import ACTIVATIONS, SETTINGS
from ...importers.toolkit import NEVER, sines
from ...model.checkpoint import Checkpoint
from ...model.config import ModelConfig
from .layout import Generate, Source
from .text_files import write_tokenizers
from .tokens import entries_of, unique

RUNTIME = "pymarian"
PRECISIONS = {"float32": True}
BEAMS = (1,)
"""A beam of Marian narrows with each output that ends, and ours does not: their outputs differ."""
NAMES = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
EPS = 1e-6
TABLE = 1e-4
"""Largest difference of a position table from Marian's: sines of large numbers differ between libraries."""
FACTOR = 3.0
"""Longest output per source token, Marian's default."""
VOCABULARIES = ("source.yml", "target.yml")
BATCH = 16
SINES = "it computes sines, then cosines, of wavelengths from 1 to 10000"
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "norm": (("standard", "rms"), "its norms are standard or rms"),
    "norm_eps": ((EPS,), f"its norms add {EPS:g}"),
    "norm_position": (("post",), "its decoder attends to what pre-norm layers did not normalize"),
    "final_norm_sides": (("both",), "both sides have a final norm or none"),
    "qk_norm": ((False,), "no norms of queries and keys"),
    "ff": (("plain",), "no gated layers"),
    "activation": (tuple(NAMES), f"it has {', '.join(NAMES)}"),
    "scale_embeddings": ((True,), "it scales embeddings"),
    "positions": (("learned",), SINES),
}
"""What a model must have, and why else it is refused. Its own positions are imported as learned ones."""
SCRIPT = """import json, sys
from pymarian import Translator
for asked, lines in json.load(sys.stdin):
    marian = Translator(config="decoder.yml", quiet=True, cpu_threads=1, mini_batch=int(sys.argv[1]), **asked)
    print(json.dumps(marian.translate(lines)))
"""
PARTS = {"attention": "self", "cross": "context"}
LETTERS = {"query": "q", "key": "k", "value": "v", "out": "o"}


def refuse(source: Source) -> Iterable[str]:
    """See `Layout`."""
    if not isinstance(source.checkpoint, Checkpoint):
        yield "a module of your own: it writes the network of tformer_deploy.model alone"
        return
    config = source.config
    for name, (supported, why) in ONLY.items():
        if (value := getattr(config, name)) not in supported:
            yield f"model.{name}={value}: {why}"
    if (config.encoder.width, config.encoder.heads) != (config.d_model, config.heads):
        yield "an encoder of another width or number of heads than the decoder's"
    if any(side.width != side.heads * side.head_dim for side in (config.encoder, config.decoder)):
        yield f"model.head_dim={config.head_dim}: heads share the width"
    if config.positions == "learned":
        yield from _values(source.checkpoint, config)
    tokenizers = source.tokenizers
    if tokenizers.around != ((), (tokenizers.source.specials.eos,)):
        yield "tokens around a source other than its end token"
    if source.options.sampling:
        yield "sampling=true: its draws are others"


def _values(checkpoint: Checkpoint, config: ModelConfig) -> Iterable[str]:
    """What the weights say that Marian cannot."""
    weights = checkpoint.load_tensors()
    wanted = sines(0, config.max_positions, config.d_model)
    for side in ("src", "tgt"):
        if not torch.allclose(weights[f"{side}_positions"], wanted, rtol=0, atol=TABLE):
            yield f"{side}_positions: {SINES}"
    if weights["tgt_embedding.weight"][config.start_id].any():
        yield f"model.start_id={config.start_id}: its decoder starts from zeros, not from an embedding"


def nearest(options: DecodeOptions) -> tuple[DecodeOptions, list[str]]:
    """See `SearchesItself`."""
    kept = ("max_tokens", "max_ratio", "length_penalty", "beams", "n_best")
    plain = DecodeOptions(**{name: getattr(options, name) for name in kept})
    lacking = [name for name in vars(plain) if getattr(options, name) != getattr(plain, name)]
    lines = [f"{name}={json.dumps(getattr(options, name))}: no such option" for name in lacking]
    lines.append("beams: its beam narrows with each output that ends, so that outputs differ")
    return replace(plain, max_ratio=0.0), lines


def write(source: Source, folder: Path) -> None:
    """See `Layout`."""
    config, tokenizers = source.config, source.tokenizers
    assert isinstance(source.checkpoint, Checkpoint)
    weights = source.checkpoint.load_tensors()
    sizes = sizes_of(config, tokenizers, weights)
    arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors_of(config, weights, sizes).items()}
    settings = "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings_of(config, sizes).items())
    arrays[SETTINGS] = np.frombuffer(settings.encode() + b"\0", np.int8)
    save_npz(folder / "model.npz", arrays)
    for name, tokens in zip(VOCABULARIES, names_of(tokenizers, sizes), strict=True):
        lines = "".join(f"{json.dumps(token, ensure_ascii=False)}: {i}\n" for i, token in enumerate(tokens))
        (folder / name).write_text(lines, encoding="utf-8")
    options = {
        "relative-paths": True,
        "models": ["model.npz"],
        "vocabs": list(VOCABULARIES),
        "beam-size": source.options.beams,
        "normalize": source.options.length_penalty,
        "max-length": config.max_positions,
        "max-length-factor": source.options.max_ratio or FACTOR,
        "allow-unk": True,
        "allow-special": True,
    }
    (folder / "decoder.yml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    write_tokenizers(tokenizers, folder)


@contextmanager
def open_runtime(source: Source, folder: Path, precision: str) -> Iterator[Generate]:
    """See `Layout`."""
    if find_spec(RUNTIME) is None:
        raise MissingExtra(f"the Python package '{RUNTIME}' is not installed: pip install {RUNTIME}")
    assert isinstance(source.checkpoint, Checkpoint)
    sizes = sizes_of(source.config, source.tokenizers, source.checkpoint.load_tensors())
    ours, theirs = names_of(source.tokenizers, sizes)
    ids = {token: i for i, token in enumerate(theirs)}

    def generate(sources: Sequence[Sequence[int]], options: DecodeOptions) -> list[list[int]]:
        order, jobs = [], []
        # Marian limits outputs by the length of a batch's longest source: those of one length have one limit.
        for length in sorted({len(each) for each in sources}):
            indices = [i for i, each in enumerate(sources) if len(each) == length]
            asked = {
                "beam_size": options.beams,
                "normalize": options.length_penalty,
                "max_length_factor": (options.max_tokens - 0.5) / length,
                "max_length": length + 1,
            }
            order += indices
            jobs.append((asked, [" ".join(ours[i] for i in sources[index][:-1]) for index in indices]))
        found = [[ids[token] for token in line.split(" ") if token] for line in translated(folder, jobs)]
        return [ids for _, ids in sorted(zip(order, found, strict=True))]

    yield generate


def translated(folder: Path, jobs: Sequence[tuple[dict[str, Any], list[str]]]) -> list[str]:
    """Lines of Marian, in a process of its own, which it would end where it meets an error."""
    command = [sys.executable, "-c", SCRIPT, str(BATCH)]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, cwd=folder)
    lines: list[str] = [line for each in done.stdout.splitlines() for line in json.loads(each)]
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "Error" in line), done.stderr[-200:])
        raise ArtifactError(f"{RUNTIME} refuses {folder}: {said}: report it, with the model's config")
    return lines


# --- files ----------------------------------------------------------------------------------------------------------


def sizes_of(config: ModelConfig, tokenizers: Tokenizers, weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Rows of both embeddings: without the entry that an import adds to start with, and zeros behind the source's."""
    target = tokenizers.target.size
    bias = weights.get("output.bias")
    never = bias is not None and bool((bias[target:] <= NEVER / 2).all())
    if not (never and config.start_id >= target):
        target = config.tgt_vocab
    if config.share_embeddings == "all":
        return target, target
    table, size = weights["src_embedding.weight"], tokenizers.source.size
    return config.src_vocab if table[size:].any() else size, target


def names_of(tokenizers: Tokenizers, sizes: tuple[int, int]) -> tuple[list[str], list[str]]:
    """The words of both vocabularies; Marian's has `</s>` and `<unk>`, and no spaces."""
    made = [_names(*side) for side in zip((tokenizers.source, tokenizers.target), sizes, strict=True)]
    return made[0], made[1]


def _names(tokenizer: Tokenizer, size: int) -> list[str]:
    specials = tokenizer.specials
    entries = ["_".join(entry.split()) for entry in entries_of(tokenizer, size)]
    entries[specials.eos], entries[specials.unk] = "</s>", "<unk>"
    return unique(entries, [specials.eos, specials.unk])


def settings_of(config: ModelConfig, sizes: tuple[int, int]) -> dict[str, Any]:
    """special:model.yml, with all that Marian asks for."""
    kind = {"standard": "n", "rms": "r"}[config.norm]
    tied = config.share_embeddings
    return {
        "type": "transformer",
        "version": "v1.12.0",
        "input-types": [],
        "dim-vocabs": list(sizes),
        "dim-emb": config.d_model,
        "enc-depth": config.encoder_layers,
        "dec-depth": config.decoder_layers,
        "tied-embeddings": tied == "decoder",
        "tied-embeddings-src": False,
        "tied-embeddings-all": tied == "all",
        "transformer-heads": config.heads,
        "transformer-dim-ffn": config.encoder.ff_width,
        "transformer-decoder-dim-ffn": config.d_ff,
        "transformer-ffn-depth": 2,
        "transformer-decoder-ffn-depth": 2,
        "transformer-ffn-activation": NAMES[config.activation],
        "transformer-no-projection": False,
        "transformer-decoder-autoreg": "rnn" if config.decoder_cell == "ssru" else "self-attention",
        "dec-cell": "ssru",  # read with autoreg rnn alone
        "layer-normalization": False,
        "skip": False,
        "transformer-tied-layers": [],
        "transformer-preprocess": "",
        "transformer-postprocess": f"a{kind}",
        "transformer-postprocess-emb": kind if config.embedding_norm else "",
        "transformer-postprocess-top": kind if config.final_norm else "",
        "transformer-train-positions": False,
        "transformer-guided-alignment-layer": "last",
    }


def tensors_of(config: ModelConfig, weights: Mapping[str, Tensor], sizes: tuple[int, int]) -> dict[str, Tensor]:
    """All parameters by Marian's names; matrices are transposed, vectors are rows."""
    target, kind = weights["tgt_embedding.weight"][: sizes[1]], "rms" if config.norm == "rms" else "ln"
    made: dict[str, Tensor] = {}
    if config.share_embeddings == "all":
        made["Wemb"] = target
    else:
        made |= {"encoder_Wemb": weights["src_embedding.weight"][: sizes[0]], "decoder_Wemb": target}
    if config.share_embeddings == "none":
        made["decoder_ff_logit_out_Wt"] = weights["output.weight"][: sizes[1]]
    bias = weights["output.bias"][: sizes[1]] if config.output_bias else torch.zeros(sizes[1])
    made["decoder_ff_logit_out_b"] = bias[None]

    def linear(ours: str, theirs: str, letter: str) -> None:
        made[f"{theirs}_W{letter}"] = weights[f"{ours}.weight"].T
        made[f"{theirs}_b{letter}"] = weights[f"{ours}.bias"][None]

    def norm(ours: str, theirs: str, suffix: str = "") -> None:
        for own, name in (("weight", "scale"), ("bias", "bias")):
            if f"{ours}.{own}" in weights:
                made[f"{theirs}_{kind}_{name}{suffix}"] = weights[f"{ours}.{own}"][None]

    for short, side, layers in (("src", "encoder", config.encoder_layers), ("tgt", "decoder", config.decoder_layers)):
        norm(f"{short}_embedding_norm", f"{side}_emb", "_pre")
        norm(f"{side}_norm", f"{side}_top")
        for i in range(layers):
            ours, theirs = f"{side}.{i}", f"{side}_l{i + 1}"
            if f"{ours}.cell.value.weight" in weights:
                linear(f"{ours}.cell.forget", f"{theirs}_rnn", "f")
                made[f"{theirs}_rnn_W"] = weights[f"{ours}.cell.value.weight"].T
                norm(f"{ours}.cell_residual.norm", f"{theirs}_rnn_ffn")
            for part, name in PARTS.items():
                if f"{ours}.{part}.query.weight" in weights:
                    for each, letter in LETTERS.items():
                        linear(f"{ours}.{part}.{each}", f"{theirs}_{name}", letter)
                    norm(f"{ours}.{part}_residual.norm", f"{theirs}_{name}_Wo")
            linear(f"{ours}.ff.up", f"{theirs}_ffn", "1")
            linear(f"{ours}.ff.down", f"{theirs}_ffn", "2")
            norm(f"{ours}.ff_residual.norm", f"{theirs}_ffn_ffn")
    return made


def save_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """An uncompressed .npz; numpy's own has 64-bit headers, which Marian's reader does not know."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), buffer.getvalue())
