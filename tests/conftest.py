"""What several tests share: a small random model, its checkpoint and its bundle."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads
if "PYTEST_XDIST_WORKER" in os.environ:  # threads of one that wait for work would keep the other from its own
    number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[number::count] or os.sched_getaffinity(0))
# Some virtual machines announce AMX and kill who uses it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import hypothesis
import numpy as np
import onnx_ir as ir
import pytest
import typer.main
from numpy.typing import NDArray

from tformer_deploy.base.files import atomic_file
from tformer_deploy.bundle.contract import GRAPHS, MEMORY_GRAPH
from tformer_deploy.bundle.manifest import Bundle
from tformer_deploy.bundle.origin import Origin
from tformer_deploy.bundle.recipe import Recipe, load_recipe
from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words
from tformer_deploy.check import corpus, walks
from tformer_deploy.check.report import Report
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.ort.library import has_vnni
from tformer_deploy.engines.ort.standard import OrtEngine
from tformer_deploy.export import checked, to_onnx
from tformer_deploy.export import trace as trace_module
from tformer_deploy.export.calibrate import input_ranges
from tformer_deploy.export.checked import export_checked
from tformer_deploy.export.graphs import GraphModule
from tformer_deploy.export.passes.rewriting import ORIGIN
from tformer_deploy.export.to_onnx import export_graphs
from tformer_deploy.export.trace import Tracer
from tformer_deploy.model.checkpoint import model_tensors, save_checkpoint, save_tensors
from tformer_deploy.model.config import ModelConfig
from tformer_deploy.model.network import Transformer

# A busy machine may stop for longer than a deadline.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")

pytest_plugins = ["tests.serving"]
VOCAB = 60
QUICK_WALKS = {"FULL_SENTENCES": 24, "FULL_STEPS": 9, "FULL_ROWS": 64}
FULL_WALKS = {name: getattr(walks, name) for name in QUICK_WALKS}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: make test-long"))


BUDGET = 10
"""Seconds of a file, above which a run names it. `make test` takes 12 minutes in two processes for all files."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each file, setup included, longest first."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    over = [f"{name} {spent:.0f}" for name, spent in seconds.most_common() if spent > BUDGET]
    terminalreporter.write_line(
        f"{sum(seconds.values()):.0f} s in {len(seconds)} files; more than {BUDGET} s: {', '.join(over) or 'none'}"
    )


def needs_vnni(variant: str) -> None:
    """Skip what runs a variant with a shortlist where this processor cannot."""
    if variant == "int8" and not has_vnni():
        pytest.skip("int8 with a shortlist needs a processor with VNNI")


def pretend_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Make `cores()` return `count`."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(count)))
    monkeypatch.setattr("tformer_deploy.base.machine._quotas", lambda _: [])


def small_config(**changes: object) -> ModelConfig:
    """Two layers a side, four heads, 24 positions."""
    values: dict[str, object] = {
        "src_vocab": VOCAB,
        "tgt_vocab": VOCAB,
        "d_model": 32,
        "d_ff": 48,
        "heads": 4,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "max_positions": 24,
    }
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes of a run."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@contextmanager
def made_once(out: Path) -> Iterator[bool]:
    """Whether this process is the one to make a folder; another that comes meanwhile waits."""
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not out.exists()


@pytest.fixture(scope="session", autouse=True)
def quick_checks() -> Iterator[None]:
    """Without a text an export decodes 12 sentences again in other batches, an eighth of the tests' time; here four.

    Nor does it read more sentences than the usual ones, or lead rows: test_check.py does, in smaller batches.
    """
    with pytest.MonkeyPatch.context() as patch:
        quick = dataclasses.replace(corpus.GENERATED, invariance=4, sentences=0, walks=0)
        patch.setattr(corpus, "GENERATED", quick)
        patch.setattr("tformer_deploy.check.GENERATED", dataclasses.replace(quick, invariance=12))
        for name, value in QUICK_WALKS.items():
            patch.setattr(walks, name, value)
        yield


@pytest.fixture
def full_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches as large as users' checks have them."""
    for name, value in FULL_WALKS.items():
        monkeypatch.setattr(walks, name, value)


@pytest.fixture(scope="session", autouse=True)
def remembered_traces(shared: Path) -> Iterator[None]:
    """A trace of our model depends on its sizes and not on its weights, and takes seconds: make each once a run."""
    made, seen, traces = trace_module.trace, {}, shared / "traces"
    traces.mkdir(exist_ok=True)

    def remembered(module: GraphModule) -> ir.Model:
        model, recipe = module.model, module.recipe
        if type(model) is not Transformer:
            return made(module)
        of_step = recipe.target, recipe.top_k, recipe.attention, recipe.axes
        key = (
            module.name,
            model.config,
            repr(model),
            recipe.opset,
            *(() if module.name in ("encoder", MEMORY_GRAPH) else of_step),
        )
        path = traces / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.onnx"
        if key not in seen and path.is_file():
            seen[key] = ir.load(path)
        elif key not in seen:
            seen[key] = made(module)
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(ir.to_proto(seen[key]).SerializeToString())
            part.rename(path)
        found = seen[key].clone()
        tensors = {**dict(model.named_buffers(remove_duplicate=False)), **model.state_dict()}
        for name, value in found.graph.initializers.items():
            if name in tensors:
                value.const_value = ir.tensor(tensors[name].detach().numpy(), name=name)
                value.meta[ORIGIN] = Origin((name,))  # files of traces do not have it
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_module, "trace", remembered)
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))  # 50 ms of every `run_here`
        yield


def random_model(config: ModelConfig, seed: int = 1) -> Transformer:
    """Random weights, and biases, of positions and gains of heads too, so that they count."""
    model = Transformer(config).init_weights(seed)
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "query_norm.weight", "key_norm.weight")) or "relative" in name:
            parameter.data += parameter.new_tensor(rng.normal(0, 0.4 if "relative" in name else 0.1, parameter.shape))
    return model


def ending_model(max_positions: int, **changes: object) -> Transformer:
    """Long outputs; likelier to stop than most, so that sentences end at different steps."""
    config = small_config(max_positions=max_positions, share_embeddings="none", **changes)
    model = random_model(config, seed=8).eval()
    model.output.weight.data[3] *= 2
    return model


def write_checkpoint(directory: Path, config: ModelConfig, seed: int = 1) -> Path:
    """A checkpoint of random weights whose words are w4, w5 and so on."""
    model = random_model(config, seed)
    sizes = config.src_vocab, config.tgt_vocab
    words = {size: Words([*SPECIALS, *(f"w{i}" for i in range(4, size))], None) for size in sizes}
    weights = directory / "weights/random.safetensors"
    save_tensors(weights, model_tensors(model))
    save_checkpoint(directory, config, Tokenizers(*(words[size] for size in sizes)), weights, {})
    return directory


def export_unchecked(run: Path, out: Path, recipes: Sequence[str]) -> Path:
    """The bundle of a run folder without its check, which takes most of the time."""
    passed = Report(0, 0, "", "", {}, {}, {})
    gate = SimpleNamespace(reference=lambda corpus: None, run=lambda *_: passed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked, "Gate", lambda *_, **__: gate)
        checked.export_checked(run, out, recipes)
    return out


@pytest.fixture(scope="session")
def run(shared: Path) -> Path:
    """A checkpoint of the small model. Read only."""
    out = shared / "run"
    with made_once(out) as missing:
        if missing:
            write_checkpoint(out, small_config())
    return out


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what tests compile; see cpp_trt.py."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def bundle(run: Path) -> Path:
    """Its exported and checked bundle. Read only: copy it to change it."""
    return exported_once(run, "bundle")


def exported_once(run: Path, name: str, *how: Any, **named: Any) -> Path:
    out = run.parent / name
    with made_once(out) as missing:
        if missing:
            export_checked(run, out, *how, **named)
    return out


@pytest.fixture(scope="session")
def variants_bundle(run: Path) -> Path:
    """The same model with graphs for ONNX Runtime on processors in every precision. Read only."""
    recipes = ["fp32", "fp32-cpu", "int8", "int8-latency", "int4"]
    return exported_once(run, "variants-bundle", recipes, write_lines(run.parent / "lines.txt"))


def write_lines(path: Path) -> Path:
    """A few lines of every length, to check and calibrate with."""
    rng = np.random.default_rng(5)
    lines = [" ".join(f"w{n}" for n in rng.integers(4, VOCAB, 1 + 2 * i)) for i in range(12)]
    with atomic_file(path) as temporary:  # another process may read it
        temporary.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def attention_bundle(run: Path) -> Path:
    """The same model exported with its cross-attention. Read only."""
    return exported_once(run, "attention-bundle", ["fp32-attention"])


def random_sources(batch: int, width: int, seed: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Ids (B, S) padded with 1 and lengths (B), the first row full."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, width + 1, batch).astype(np.int32)
    lengths[0] = width
    ids = rng.integers(4, VOCAB, (batch, width)).astype(np.int32)
    ids[np.arange(width) >= lengths[:, None]] = 1
    return ids, lengths


def calibration_sources(config: ModelConfig) -> list[list[int]]:
    """What `variant_engine` calibrates with."""
    rng = np.random.default_rng(4)
    return [rng.integers(4, config.src_vocab, 1 + n % config.max_positions).tolist() for n in range(24)]


def variant_engine(
    model: Transformer, folder: Path, recipe: Recipe | str = "fp32-cpu", graphs: Sequence[str] = GRAPHS
) -> OrtEngine:
    """An engine of some of a model's graphs for processors, without a bundle around them; not entered."""
    named = load_recipe(recipe) if isinstance(recipe, str) else recipe
    chosen, config = named.for_model(model.config), model.config
    ranges = input_ranges(model, calibration_sources(config)) if chosen.precision != "fp32" else {}
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_onnx, "made_of", lambda recipe, config: graphs)
        export_graphs(Tracer(model.eval()), chosen, folder / "variant", "0", ranges)
    files = {f"variant/{name}.onnx": "" for name in graphs}
    manifest = {"checkpoint": {"weights_sha256": "0", "path": "nowhere"}, "files": files}
    manifest["variants"] = {"variant": {"graphs": {}}}
    standard = Recipe().for_model(config)
    bundle = Bundle(folder, config, standard, manifest, {"variant": chosen}, "variant")
    return make_engine("ort:variant", bundle, threads=1)  # type: ignore[return-value]
