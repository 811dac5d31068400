"""Layout `transformers-js`: the folder that transformers.js opens, in browsers and in Node, in four precisions.

transformers.js has no beam search: it ignores num_beams. So the folder is proven for greedy search alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...base.errors import EngineError, MissingExtra
from ...base.files import write_json
from ...decoding import DecodeOptions
from .hf_config import config_json, generation_json, refused
from .hf_graphs import ENCODER, MERGED, make_graph, save_graph
from .hf_precisions import lowered
from .hf_text import write_text
from .layout import Generate, Source

RUNTIME = "transformers.js"
PRECISIONS = {"fp32": True, "fp16": False, "q8": False, "q4": False}
SUFFIXES = {"fp32": "", "fp16": "_fp16", "q8": "_quantized", "q4": "_q4"}
"""Of files, by what transformers.js calls `dtype`."""
BEAMS = (1,)
PACKAGE = "@huggingface/transformers"
BATCH = 16
MESSAGE = 300


def refuse(source: Source) -> Iterable[str]:
    """See `Layout.refuse`."""
    return refused(source, beams=False)


def write(source: Source, folder: Path) -> None:
    """See `Layout.write`."""
    model = source.checkpoint.load_model()
    (folder / "onnx").mkdir()
    for name in (ENCODER, MERGED):
        graph = make_graph(name, model)
        for precision in PRECISIONS:
            made = lowered(graph, precision)
            path = folder / "onnx" / f"{name}{SUFFIXES[precision]}.onnx"
            save_graph(made, path, source.checkpoint.weights_sha256)
    config = config_json(source)
    # It would end outputs a token early: its limit counts the start token.
    config.pop("max_position_embeddings", None)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_json(source, beams=False))
    write_text(source, folder, marian=False)


@contextmanager
def open_runtime(source: Source, folder: Path, precision: str) -> Iterator[Generate]:
    """See `Layout.open_runtime`: Node, with the package of the current folder's node_modules."""
    node = shutil.which("node")
    how = f"npm install {PACKAGE} in the folder where you run this"
    if node is None:
        raise MissingExtra(f"Node.js is not installed: install it from nodejs.org, then {how}")
    script = Path(__file__).with_suffix(".mjs").read_text(encoding="utf-8")

    def generate(sources: Sequence[Sequence[int]], options: DecodeOptions) -> list[list[int]]:
        with tempfile.TemporaryDirectory() as temporary:
            request, out = Path(temporary, "request.json"), Path(temporary, "out.json")
            asked = {"folder": str(folder.resolve()), "dtype": precision, "batch": BATCH, "out": str(out)}
            asked |= {"sources": sources, "max_length": options.max_tokens + 1}
            write_json(request, asked)
            command = [node, "--input-type=module", "--eval", script, str(request)]
            environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if "ERR_MODULE_NOT_FOUND" in ran.stderr:
                raise MissingExtra(f"{PACKAGE} is not installed here: {how}")
            if ran.returncode or not out.is_file():
                said = " ".join(line for line in ran.stderr.splitlines() if "Error" in line)[:MESSAGE]
                raise EngineError(f"transformers.js cannot run {folder}, {precision}: {said or ran.returncode}")
            return [list(map(int, ids)) for ids in json.loads(out.read_text(encoding="utf-8"))]

    yield generate
