"""Layout `one-file`: one ONNX file that generates by itself, in any language that has ONNX Runtime.

Beside it are tokenizers: ours, and for libraries in other languages Hugging Face's files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from ....base.files import write_json
from ....bundle.recipe import load_recipe
from ....decoding import DecodeOptions
from ....engines import STANDARD
from ....engines.ort.library import InferenceSession, check_library, loading, open_session, session_options
from ....model.seq2seq import Seq2Seq
from ...to_onnx import label
from ..hf_text import write_text
from ..layout import Generate, Source
from ..text_files import write_tokenizers
from ..written import BATCH
from .feeding import feed_of, feed_sources
from .joining import Composer

RUNTIME = "onnxruntime"
PRECISIONS = {"fp32": True}
BEAMS = (1, 4)
FILE, DESCRIPTION = "generate.onnx", "generate.json"
LIBRARIES = "transformers"
"""The folder of Hugging Face's files."""
MOST_BYTES = 1_900_000_000
"""A larger model has its weights beside it: one message of protobuf holds no 2 GiB."""
BAKED = (
    "max_ratio",
    "min_ratio",
    "length_norm",
    "stop",
    "patience",
    "end_ids",
    "endless",
    "first_adds_zero",
    "forced_end",
)
"""Decoding options that are constants of the file."""


def refuse(source: Source) -> Iterable[str]:
    """See `Layout.refuse`."""
    if source.config.decoder_cell != "attention":
        yield f"model.decoder_cell={source.config.decoder_cell}: its loop carries keys and values"
    for name, why in (
        ("sampling", "it searches"),
        ("coverage_penalty", "it reads no attention"),
        ("align", "it reads no attention"),
    ):
        if value := getattr(source.options, name):
            yield f"{name}={json.dumps(value)}: {why}"


def write(source: Source, folder: Path) -> None:
    """See `Layout.write`."""
    model = make_graph(source.checkpoint.load_model(), source.options)
    label(model, metadata(source))
    path = folder / FILE
    beside = sum(len(each.raw_data) for each in model.graph.initializer) > MOST_BYTES
    onnx.save_model(model, path, save_as_external_data=beside, location=f"{path.name}_data")
    onnx.checker.check_model(path)
    write_json(folder / DESCRIPTION, description(source))
    write_tokenizers(source.tokenizers, folder)
    libraries = folder / LIBRARIES
    libraries.mkdir()
    write_text(source, libraries, marian=False)
    if not list(libraries.iterdir()):  # such files cannot say these tokenizers
        libraries.rmdir()


def make_graph(model: Seq2Seq, options: DecodeOptions) -> onnx.ModelProto:
    """The graph of a model; of `options`, those of `BAKED` are in it."""
    return ir.to_proto(Composer(model, options, load_recipe(STANDARD).for_model(model.config)).compose())


def metadata(source: Source) -> dict[str, str]:
    """What the file says of itself."""
    about = {"tformer.graph": "generate", "tformer.weights_sha256": source.checkpoint.weights_sha256}
    return {**about, "tformer.generate": json.dumps(description(source))}


def description(source: Source) -> dict[str, Any]:
    """How to feed the file: special ids, what each input but the sources usually is, and what is constant."""
    options, config = dataclasses.asdict(source.options), source.config
    inputs = {
        name: {"type": value.dtype.name, "value": value.tolist()} for name, value in feed_of(source.options).items()
    }
    prefix, suffix = source.tokenizers.around
    return {
        "pad_id": config.pad_id,
        "max_positions": config.max_positions,
        "around_source": [list(prefix), list(suffix)],
        "inputs": inputs,
        "constants": {name: options[name] for name in BAKED} | {"end_ids": source.options.ends(config.eos_id)},
    }


@contextmanager
def open_runtime(source: Source, folder: Path, precision: str) -> Iterator[Generate]:
    """See `Layout.open_runtime`."""
    check_library()
    path = folder / FILE
    with loading(path):
        session = open_session(path, session_options(0))

    def generate(sources: Sequence[Sequence[int]], options: DecodeOptions) -> list[list[int]]:
        found = []
        for i in range(0, len(sources), BATCH):
            found += [each[0] for each in outputs_of(session, sources[i : i + BATCH], source.config.pad_id, options)]
        return found

    yield generate


def outputs_of(
    session: InferenceSession, sources: Sequence[Sequence[int]], pad: int, options: DecodeOptions
) -> list[list[list[int]]]:
    """The best outputs of each source."""
    feed: dict[str, Any] = {**feed_sources(sources, pad), **feed_of(options)}
    ids, lengths = session.run(["ids", "lengths"], feed)
    return [
        [each[:length].tolist() for each, length in zip(*both, strict=True)] for both in zip(ids, lengths, strict=True)
    ]
