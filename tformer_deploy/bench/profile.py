"""Time per kind of node by ONNX Runtime's profiler, in a session of its own."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import EngineError
from ..base.files import scratch
from ..bundle.contract import GRAPHS
from ..bundle.manifest import Bundle
from ..decoding import DecodeOptions
from ..engines import make_engine
from ..engines.ort.standard import OrtGraphs
from .measure import decode_part, synthetic_sources
from .plan import Point
from .report import NodeKind

STEPS, ENCODINGS = 64, 16
"""Profiled steps, at least, and profiled calls of the encoder: enough for a median."""
REST = "(between nodes)"
"""Name of the time that a graph spends outside its nodes."""


def node_kinds(bundle: Bundle, name: str, threads: int, point: Point, shortlist: bool = False) -> list[NodeKind]:
    """Median times of one encoder call and one step by kind of node, the longest first, of a whole `point`."""
    engine = make_engine(name, bundle, None, threads, shortlist)
    assert isinstance(engine, OrtGraphs)
    src_ids = synthetic_sources(bundle.config, point)
    repetitions = max(1, STEPS // point.new_tokens)
    warm_up = min(2, point.new_tokens)
    with scratch("tformer-profile") as folder:
        engine.profile = str(folder / "trace")
        with engine:
            decode_part(engine, src_ids, DecodeOptions(max_tokens=warm_up, beams=point.beams, endless=True))
            for _ in range(repetitions):
                decode_part(
                    engine, src_ids, DecodeOptions(max_tokens=point.new_tokens, beams=point.beams, endless=True)
                )
            for _ in range(ENCODINGS):
                engine.encode(src_ids, np.full(len(src_ids), src_ids.shape[1], np.int32))
            traces = [Path(session.end_profiling()) for session in engine.sessions()]
        found = [
            kind
            for graph, trace, skipped in zip(GRAPHS, traces, (1, warm_up), strict=True)
            for kind in read_trace(graph, trace, skipped)
        ]
    return sorted(found, key=lambda kind: (GRAPHS.index(kind.graph), -kind.ms))


def read_trace(graph: str, trace: Path, skipped: int) -> list[NodeKind]:
    """Median time of each kind of node, over all runs but the first `skipped`."""
    runs: list[tuple[float, float]] = []
    nodes: list[tuple[float, float, str]] = []
    for event in _events(trace):
        if event["name"] == "model_run":
            runs.append((event["ts"], event["dur"]))
        elif event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            nodes.append((event["ts"], event["dur"], event["args"]["op_name"]))
    runs = sorted(runs)[skipped:]
    starts = [start for start, _ in runs]
    times: dict[str, Any] = defaultdict(lambda: np.zeros(len(runs)))
    counts: Counter[str] = Counter()
    for start, micros, kind in nodes:
        run = bisect_right(starts, start) - 1
        if run >= 0:
            times[kind][run] += micros
            counts[kind] += 1
    times[REST] = np.maximum(0, np.array([micros for _, micros in runs]) - sum(times.values()))
    return [NodeKind(graph, kind, float(np.median(t)) / 1e3, counts[kind] / len(runs)) for kind, t in times.items()]


def _events(trace: Path) -> Iterator[dict[str, Any]]:
    """Events of a trace, one line each, read one by one: a trace may have hundreds of megabytes.

    Raises EngineError for a damaged one.
    """
    with trace.open(encoding="utf-8") as lines:
        for line in lines:
            text = line.strip().rstrip(",")
            if text.startswith("{") and '"cat"' in text:
                try:
                    yield json.loads(text)
                except ValueError:
                    raise EngineError(f"{trace} is damaged: make room for temporary files, or set TMPDIR") from None
