"""Which outputs of new plans are not those of their graphs: every tensor of some steps, beside ONNX Runtime's.

`where.py BUNDLE FLAVOR PRECISION PROFILE...` builds the plans anew. Steps run as CUDA graphs and one by one, and from
the second on continue other rows. Prints a report as JSON; exit code 3 where something differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tformer_deploy.base.errors import EngineError
from tformer_deploy.bundle.contract import GRAPHS, cache_names
from tformer_deploy.bundle.manifest import Bundle, open_bundle
from tformer_deploy.bundle.plans import Profile, parse_profile, trt_variant
from tformer_deploy.engines.base import Outlook
from tformer_deploy.engines.ort.library import InferenceSession
from tformer_deploy.engines.speculative import Choice
from tformer_deploy.engines.trt.api import Kernels, load_builder, make_runtime
from tformer_deploy.engines.trt.cuda import Stream
from tformer_deploy.engines.trt.device import TrtDevice
from tformer_deploy.export.build import type_graph
from tformer_deploy.export.trt_builder import BuildOptions, compile_plan

STEPS, NEAR = 4, {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.5}
"""Steps that run, and the largest difference that counts as none."""
Arrays = dict[str, NDArray[Any]]


class Side:
    """ONNX Runtime on the graphs that plans are made of."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.sessions = {name: InferenceSession(str(file)) for name, file in files.items()}

    def run(self, graph: str, given: Arrays) -> Arrays:
        """All outputs by name; of `given` what the graph takes."""
        session = self.sessions[graph]
        names = [each.name for each in session.get_outputs()]
        taken = {each.name: given[each.name] for each in session.get_inputs()}
        return dict(zip(names, session.run(names, taken), strict=True))


def requests(bundle: Bundle, profile: Profile) -> Arrays:
    """Sources of random lengths that fill a profile."""
    rng, config = np.random.default_rng(0), bundle.config
    ids = rng.integers(4, config.src_vocab, (profile.batch, profile.src_len)).astype(np.int32)
    lengths = rng.integers(1, profile.src_len + 1, profile.batch).astype(np.int32)
    ids[np.arange(profile.src_len) >= lengths[:, None]] = config.pad_id
    return {
        "src_ids": ids, "src_lengths": lengths, "end_id": np.array([config.eos_id], np.int32),
        "live_beams": np.array([profile.beams], np.int32),
    }  # fmt: skip


def choices(bundle: Bundle, profile: Profile) -> list[Choice]:
    """Inputs of the steps: random tokens; from the second on, rows of their own sentence to continue."""
    rng, shape = np.random.default_rng(1), (profile.batch, profile.beams)
    first = np.arange(shape[0])[:, None] * shape[1]
    found = []
    for step in range(min(STEPS, profile.capacity)):
        parents = first + (rng.integers(0, shape[1], shape) if step else np.arange(shape[1]))
        tokens = rng.integers(4, bundle.config.tgt_vocab, shape)
        values = -rng.random(shape)
        positions = np.full(shape, step, np.int32)
        found.append(Choice(tokens.astype(np.int32), parents.astype(np.int32), values.astype(np.float32), positions))
    return found


def differences(bundle: Bundle, profile: Profile, side: Side, device: TrtDevice, near: float) -> list[dict[str, Any]]:
    """Step, tensor, and the largest difference or the share of other integers."""
    given, found = requests(bundle, profile), []
    cross, past, present = (cache_names(kind, bundle.config) for kind in ("cross", "past", "present"))
    device.encode(given["src_ids"], given["src_lengths"], Outlook(profile.beams, end_id=bundle.config.eos_id))
    encoded = side.run(GRAPHS[0], given)
    real = np.arange(profile.src_len) < given["src_lengths"][:, None]
    pairs = zip(cross, device.cross(), strict=True)
    found += [
        apart(near, -1, name, ours.swapaxes(1, 2)[real], encoded[name].swapaxes(1, 2)[real]) for name, ours in pairs
    ]
    shapes = {each.name: each.shape for each in side.sessions[GRAPHS[1]].get_inputs()}
    state = {name: np.zeros(shapes[name], device.caches(0)[0].dtype) for name in past}
    for step, choice in enumerate(choices(bundle, profile)):
        theirs = side.run(GRAPHS[1], {**given, **encoded, **state, **vars(choice)})
        device.feed(choice, step)
        device.issue(step)
        record = device.read(step)
        ours = {"top_ids": record.ids, "top_scores": record.scores, "log_probs": device.log_probs(step)}
        ours |= {f"next_{name}": value for name, value in vars(record.next).items()}
        ours |= dict(zip(present, device.caches(step + 1), strict=True))
        found += [apart(near, step, name, value, theirs[name]) for name, value in ours.items()]
        state = dict(zip(past, (theirs[name] for name in present), strict=True))
    return found


def apart(near: float, step: int, name: str, ours: NDArray[Any], theirs: NDArray[Any]) -> dict[str, Any]:
    """One tensor."""
    if ours.dtype.kind == "i":
        return {"step": step, "tensor": name, "other": float((ours != theirs).mean())}
    off = np.abs(ours.astype(np.float32) - theirs.astype(np.float32))
    rows = off.reshape(len(off), -1).max(1)
    return {
        "step": step,
        "tensor": name,
        "largest": float(rows.max()),
        "rows": np.flatnonzero(rows > near)[:40].tolist(),
    }


def compared(bundle: Bundle, flavor: str, precision: Any, profile: Profile) -> dict[str, Any]:
    """Build, run both ways, compare."""
    tensorrt, variant = load_builder(flavor), trt_variant(bundle)
    runtime, reasons = make_runtime(tensorrt.module)
    report: dict[str, Any] = {"profile": str(profile), "precision": precision, "tensorrt": tensorrt.title}
    with tempfile.TemporaryDirectory() as folder:
        files = {graph: Path(folder) / f"{graph}.onnx" for graph in GRAPHS}
        plans = []
        for graph, file in files.items():
            type_graph(bundle.graph(graph, variant), file, profile, precision, {}, tensorrt.major)
            plans.append(runtime.deserialize_cuda_engine(compile_plan(tensorrt, file, BuildOptions(precision)).data))
        side = Side(files)
        owner: Any = SimpleNamespace(
            config=bundle.config, tensorrt=tensorrt, kernels=Kernels(tensorrt, "where.kernels"), timings=None,
            reasons=lambda: "; ".join(reasons),
        )  # fmt: skip
        capture = Stream.capture
        for name, use in (("CUDA graphs", capture), ("one by one", refuse)):
            Stream.capture = use  # type: ignore[method-assign, assignment]
            device = TrtDevice(owner, profile, *plans)
            found = differences(bundle, profile, side, device, NEAR[precision])
            device.free()
            wrong = [each for each in found if each.get("largest", 0.0) > NEAR[precision] or each.get("other")]
            report[name] = {"compared": len(found), "wrong": wrong}
        Stream.capture = capture  # type: ignore[method-assign]
    return report


def refuse(stream: Stream, work: Any) -> Any:
    """In place of `Stream.capture`: steps are then run one by one."""
    raise EngineError("not asked for")


def main(arguments: list[str]) -> int:
    """See above."""
    folder, flavor, precision, *profiles = arguments
    reports = [compared(open_bundle(Path(folder)), flavor, precision, parse_profile(each)) for each in profiles]
    print(json.dumps({"reports": reports}))
    return 3 if any(each[name]["wrong"] for each in reports for name in ("CUDA graphs", "one by one")) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
