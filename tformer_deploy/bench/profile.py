"""Time per kind of node, from ONNX Runtime's own profiler, in a session apart from the timed ones."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..bundle import Bundle
from ..contract import GRAPHS
from ..decoding import DecodeOptions
from ..engines import make_engine
from ..engines.ort import OrtEngine
from .measure import decode_part, random_sources
from .plan import Point
from .report import NodeKind

STEPS = 64
"""Decodes are repeated until there are so many steps."""
REST = "(between nodes)"
"""The name of the time in a graph that no node takes."""


def node_kinds(bundle: Bundle, name: str, threads: int, point: Point) -> list[NodeKind]:
    """Mean times of one encoder call and one step, the longest first, at a point of one worker."""
    engine = make_engine(name, bundle, None, threads)
    assert isinstance(engine, OrtEngine)
    src_ids = random_sources(bundle.config, point)
    repetitions = max(1, STEPS // point.new_tokens)
    warm_up = min(2, point.new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        engine.profile = str(Path(folder) / "trace")
        with engine:
            decode_part(engine, src_ids, DecodeOptions(max_tokens=warm_up, beams=point.beams))
            for _ in range(repetitions):
                decode_part(engine, src_ids, DecodeOptions(max_tokens=point.new_tokens, beams=point.beams))
            traces = [Path(session.end_profiling()) for session in engine.sessions()]
        found = [
            kind
            for graph, trace, skipped in zip(GRAPHS, traces, (1, warm_up), strict=True)
            for kind in read_trace(graph, trace, skipped)
        ]
    return sorted(found, key=lambda kind: -kind.ms)


def read_trace(graph: str, trace: Path, skipped: int) -> list[NodeKind]:
    """The kinds of a graph's nodes, means over all runs but the first `skipped`."""
    runs: list[tuple[float, float]] = []
    nodes: list[tuple[float, float, str]] = []
    for event in _events(trace):
        if event["name"] == "model_run":
            runs.append((event["ts"], event["dur"]))
        elif event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            nodes.append((event["ts"], event["dur"], event["args"]["op_name"]))
    runs = sorted(runs)[skipped:]
    times: dict[str, list[float]] = defaultdict(list)
    for start, micros, kind in nodes:
        if start >= runs[0][0]:
            times[kind].append(micros)
    found = [NodeKind(graph, kind, sum(t) / 1e3 / len(runs), len(t) / len(runs)) for kind, t in times.items()]
    rest = sum(micros for _, micros in runs) / 1e3 / len(runs) - sum(kind.ms for kind in found)
    return [*found, NodeKind(graph, REST, float(np.maximum(rest, 0)), 0)]


def _events(trace: Path) -> Iterator[dict[str, Any]]:
    """One at a time: a trace of long outputs has hundreds of megabytes. ONNX Runtime writes one a line."""
    with trace.open(encoding="utf-8") as lines:
        for line in lines:
            text = line.strip().rstrip(",")
            if text.startswith("{") and '"cat"' in text:
                yield json.loads(text)
