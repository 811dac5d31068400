"""What runs a bundle's model: eager PyTorch, ONNX Runtime, TensorRT, the CPU engine; `make_engine` knows them by name.

In: a bundle and a name such as `ort:int8@cuda`. Out: an object of `engines.base.Engine`.
`translate`, `check` and `bench` use it; of `export`, only `checked` and `build` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError, EngineError, extras, unknown
from ..base.machine import cores
from ..base.settings import check_whole
from ..bundle.contract import MEMORY_GRAPH
from ..bundle.manifest import Bundle
from ..bundle.plans import PRECISIONS, trt_variant
from ..bundle.recipe import Recipe
from ..bundle.shortlist import open_shortlist
from .base import Encoder, Engine, Limits

if TYPE_CHECKING:
    from ..model.checkpoint import Checkpoint
    from ..model.modules.running import UserCheckpoint
    from .eager import EagerEngine

LISTING = {"ort-cpu": {"ort", "cpp"}, "native": {"native"}}
"""Targets whose variants can score the tokens of a list alone, and the backends that run these."""
BACKENDS = ("eager", "ort", "trt", "cpp", "native")
DEVICES = ("cpu", "cuda")
MOST_ANYWHERE, MOST_PER_CORE = 64, 4
"""Threads or workers that are not refused on any machine, and for each core of a large one."""
MOST_BATCH_TOKENS = 1 << 24
"""Tokens of a batch; so many are more than any memory holds."""
STANDARD = "fp32"
"""What the standard graphs are called where variants are named."""


@dataclass(frozen=True)
class Name:
    """An engine's name, `BACKEND[:VARIANT][@DEVICE]`, in parts."""

    backend: str
    variant: str = ""
    """Graphs of ort and cpp, program of native, precision of trt's plans; empty: the standard graphs, or the first."""
    device: str = "cpu"
    """`cpu` or `cuda`, where `trt` always is."""


def parse_name(name: str) -> Name:
    """Take a name apart."""
    front, _, device = name.partition("@")
    backend, _, variant = front.partition(":")
    return Name(backend, variant, "cuda" if backend == "trt" else device or "cpu")


def engine_names(bundle: Bundle) -> list[str]:
    """All that can run a bundle: `eager`, `ort` for its standard graphs, `ort:NAME` for each variant, `cpp` as `ort`.

    With graphs for TensorRT also `trt`, `trt:PRECISION` for plans of one precision, and ONNX Runtime on a GPU. With
    programs `native`, which is the first, and `native:NAME`.
    """
    variants = _variants(bundle)
    names = ["eager", "eager@cuda", "ort", *(f"ort:{name}" for name in variants["ort"][1:])]
    for name, recipe in bundle.variants.items():
        if recipe.target == "trt":
            names += [f"ort:{name}@cuda", "trt", *(f"trt:{precision}" for precision in PRECISIONS)]
    names += ["cpp", *(f"cpp:{name}" for name in variants["cpp"][1:])]
    programs = variants["native"]
    return [*names, *(["native"] if programs else []), *(f"native:{name}" for name in programs)]


def _variants(bundle: Bundle) -> dict[str, list[str]]:
    """What `--variant` may be of the backends that run graphs or programs, the standard graphs first."""
    ort = [name for name, recipe in bundle.variants.items() if recipe.target != "native"]
    cpp = [name for name in ort if bundle.variants[name].target != "trt"]
    return {"ort": [STANDARD, *ort], "cpp": [STANDARD, *cpp], "native": programs_of(bundle)}


def programs_of(bundle: Bundle) -> list[str]:
    """Variants that the C++ runtime's own engine runs, in its order."""
    return sorted(name for name, recipe in bundle.variants.items() if recipe.target == "native")


def check_name(name: str, bundle: Bundle) -> None:
    """Raise ConfigError for an engine that a bundle does not have."""
    if parse_name(name).backend == "trt":
        trt_variant(bundle)
    if parse_name(name).backend == "native" and not bundle.config.decoder_layers:
        raise ConfigError(f"{bundle.directory} has an encoder alone, for ort and eager: leave out --backend native")
    if parse_name(name).backend == "native" and not programs_of(bundle):
        raise ConfigError(f"{bundle.directory} has no program for native: export it again and add --recipe native-int8")
    if name not in engine_names(bundle):
        raise unknown("backend", name, engine_names(bundle))


def recipe_of(name: str, bundle: Bundle) -> Recipe:
    """How the graphs of an engine were made; the standard ones for `eager`."""
    parts = parse_name(name)
    if parts.backend == "trt":
        return bundle.variants[trt_variant(bundle)]
    if name == "native":
        return bundle.variants[programs_of(bundle)[0]]
    return bundle.variants[parts.variant] if parts.variant else bundle.recipe


def explain(names: Sequence[str], bundle: Bundle) -> list[str]:
    """A line for each engine whose name does not say what runs."""
    return [
        f"{name}: the graphs that tformer build compiles for TensorRT, here on ONNX Runtime, without a GPU"
        for name in names
        if parse_name(name).backend == "ort" and recipe_of(name, bundle).target == "trt"
    ]


def engine_name(backend: str, variant: str | None, bundle: Bundle, device: str = "cpu") -> str:
    """The engine of a backend and a variant; none: the bundle's default. Raises ConfigError for a wrong variant."""
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    if device == "cuda" and parse_name(backend).backend in ("eager", "ort"):
        return _on_gpu(parse_name(backend), variant, bundle)
    if device == "cuda" and parse_name(backend).backend in ("cpp", "native"):
        raise ConfigError("--device cuda: the C++ runtime runs on processors: leave it out")
    if variant is None and backend in ("ort", "cpp") and bundle.default:
        return f"{backend}:{bundle.default}"
    if variant is None and backend == "native" and programs_of(bundle):
        return f"{backend}:{programs_of(bundle)[0]}"
    if variant is None or (variant == STANDARD and backend in ("ort", "cpp")):
        return backend
    names = {**_variants(bundle), "trt": list(PRECISIONS)}.get(backend)
    if names is None:
        raise ConfigError(f"--variant {variant}: {backend} has no variants")
    if variant not in names:
        check_name(backend, bundle)  # a bundle without variants for it
        raise unknown("variant", variant, names)
    return f"{backend}:{variant}"


def _on_gpu(parts: Name, variant: str | None, bundle: Bundle) -> str:
    asked = variant or parts.variant
    if parts.backend == "eager":
        if asked:
            raise ConfigError(f"--variant {asked}: eager has no variants")
        return "eager@cuda"
    own = trt_variant(bundle)
    if asked not in ("", own):
        raise ConfigError(f"--device cuda: ONNX Runtime runs --variant {own} on a GPU, not {asked}")
    return f"ort:{own}@cuda"


def expand(backends: Sequence[str], variants: Sequence[str], bundle: Bundle, device: str = "cpu") -> list[str]:
    """The engines of some backends; `ort`, `cpp` and `native` stand for what they run, of `variants` if there are some.

    Raises ConfigError for a backend or device that does not exist, and for a variant that none of the backends runs.
    """
    for backend in backends:
        check_name(backend, bundle)
    every = _variants(bundle)
    runs = {backend: every.get(backend, [parse_name(backend).variant]) for backend in backends}
    valid = {variant for names in runs.values() for variant in names if variant}
    if variants and not valid:
        raise ConfigError(f"--variant {variants[0]}: variants are graphs of ort: add --backend ort")
    for variant in variants:
        if variant not in valid:
            raise unknown("variant", variant, valid)
    found: list[str] = []
    for backend in backends:
        chosen: Sequence[str | None] = [None]
        if backend in every and variants:
            chosen = [variant for variant in variants if variant in runs[backend]]
        elif backend in every and device == "cpu":
            chosen = runs[backend]
        found += [engine_name(backend, variant, bundle, device) for variant in chosen]
    return list(dict.fromkeys(found))


def require_each(backends: Sequence[str], engines: Sequence[str]) -> None:
    """Raise ConfigError for a backend of which `expand` found no engine, as it runs none of the variants."""
    there = {parse_name(engine).backend for engine in engines}
    for backend in backends:
        if parse_name(backend).backend not in there:
            raise ConfigError(f"--backend {backend} runs none of the variants asked for by --variant: leave it out")


def check_checkpoint(checkpoint: str | Path | None, engines: Iterable[str]) -> None:
    """Raise ConfigError for a run folder where none of the engines is eager, which alone reads it."""
    if checkpoint is not None and not any(parse_name(engine).backend == "eager" for engine in engines):
        raise ConfigError(f"--checkpoint {checkpoint}: only eager reads it: add --backend eager, or leave it out")


def limits_of(name: str, bundle: Bundle) -> Limits:
    """What an engine takes, without entering it. Raises what entering it would where that needs a look at plans."""
    backend = parse_name(name).backend
    if backend == "trt":
        engine: Any = make_engine(name, bundle)
        return engine.look().limits  # type: ignore[no-any-return]
    return Limits.eager(bundle.config) if backend == "eager" else Limits.of(recipe_of(name, bundle).axes)


def most_parallel() -> int:
    """The most threads or workers: several for each core of this process, so that waiting ones cost nothing."""
    return max(MOST_ANYWHERE, MOST_PER_CORE * cores())


def threads_each(threads: int, workers: int) -> int:
    """Threads of an engine's call where `workers` call it at the same time; 0: they share the cores evenly.

    Raises ConfigError for more of either than helps.
    """
    check_whole("workers", workers, 1, most_parallel())
    check_whole("threads", threads, 0, most_parallel())
    return threads or max(1, cores() // workers)


@extras()
def make_engine(
    name: str, bundle: Bundle, checkpoint: Path | None = None, threads: int = 0, shortlist: bool = False
) -> Engine:
    """An engine of `engine_names` that is not entered yet.

    `checkpoint` is for `eager` alone; without it the place is used where the checkpoint was at export. `threads` 0:
    as many as this process has cores. `shortlist`: score only the tokens that the bundle's lists have for a source.
    Raises MissingExtra where the backend's packages are not installed, ConfigError where there are no lists or no
    graphs for them.
    """
    bundle.require_decoder()
    check_name(name, bundle)
    check_whole("threads", threads, 0, most_parallel())
    parts = parse_name(name)
    if shortlist and recipe_of(name, bundle).target not in LISTING:
        usable = [each for each, recipe in bundle.variants.items() if recipe.target in LISTING]
        own = all(bundle.variants[each].target == "native" for each in usable)
        backend = "--backend native with " if usable and own else ""
        raise ConfigError(
            f"--shortlist: {name} has no graphs for it: use {backend}a variant of {', '.join(usable) or 'int8'}"
        )
    lists = open_shortlist(bundle, parts.variant) if shortlist else None
    if parts.backend == "trt":
        from .trt.engine import TrtEngine

        return TrtEngine(bundle, parts.variant)
    if parts.backend == "cpp":
        from .cpp import CppEngine

        return CppEngine(bundle, threads, parts.variant, shortlist)
    if parts.backend == "native":
        from .native import NativeEngine

        return NativeEngine(bundle, threads, parts.variant or programs_of(bundle)[0], shortlist)
    if name == "ort":
        from .ort.standard import OrtEngine

        return OrtEngine(bundle, threads)
    if parts.backend == "ort":
        if bundle.variants[parts.variant].target == "trt":
            trt_variant(bundle)  # refuses graphs of an older version
            from .ort.choosing import ChoosingEngine

            return ChoosingEngine(bundle, threads, parts.variant, parts.device)
        from .ort.in_place import InPlaceEngine

        return InPlaceEngine(bundle, threads, parts.variant, lists)
    return _eager(bundle, checkpoint, threads, parts.device)


@extras()
def require_native() -> None:
    """Raise MissingExtra where programs cannot be run."""
    from .native import check_version

    check_version()


def encoder_names(bundle: Bundle) -> list[str]:
    """The engines that have the graph for the encoder alone, by their names."""
    found = ["ort"] if bundle.lists(MEMORY_GRAPH, "") else []
    found += [f"ort:{name}" for name in bundle.variants if bundle.lists(MEMORY_GRAPH, name)]
    return found + [f"native:{name}" for name in programs_of(bundle) if bundle.variants[name].memory]


@extras()
def make_encoder(name: str, bundle: Bundle, checkpoint: Path | None = None, threads: int = 0) -> Encoder:
    """`eager`, or an engine of `encoder_names`, for the encoder alone; not entered yet.

    Raises what `make_engine` does, and ConfigError where there is no graph for it.
    """
    parts = parse_name(name)
    if parts.backend == "trt":
        raise ConfigError("plans have no graph for the encoder alone: use --backend ort or eager")
    if parts.backend == "cpp":
        raise ConfigError("the C++ runtime runs the encoder alone only of programs: use --backend native or ort")
    check_name(name, bundle)
    name = f"native:{programs_of(bundle)[0]}" if name == "native" else name
    parts = parse_name(name)
    check_whole("threads", threads, 0, most_parallel())
    if parts.backend in ("ort", "native") and name not in encoder_names(bundle):
        same = [parse_name(each) for each in encoder_names(bundle) if parse_name(each).backend == parts.backend]
        others = [each.variant or STANDARD for each in same]
        use = f"use --variant {' or '.join(others)}" if others else "export it again with --memory, or use eager"
        what = f"variant {parts.variant}" if parts.variant else "the standard graphs"
        raise ConfigError(f"{bundle.directory}: {what} cannot run the encoder alone: {use}")
    if parts.backend == "eager":
        return _eager(bundle, checkpoint, threads, parts.device)
    if parts.backend == "native":
        from .native import NativeEngine

        return NativeEngine(bundle, threads, parts.variant)
    from .ort.memory import OrtMemory

    return OrtMemory(bundle, threads, parts.variant)


def _eager(bundle: Bundle, directory: Path | None, threads: int, device: str) -> EagerEngine:
    import torch

    from ..model.checkpoint import open_reference

    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError("eager on cuda: this PyTorch finds no GPU: install the driver and a PyTorch with CUDA")
    return eager_of(open_reference(bundle, directory), bundle, threads, device)


def eager_of(
    checkpoint: Checkpoint | UserCheckpoint, bundle: Bundle, threads: int = 0, device: str = "cpu"
) -> EagerEngine:
    """Eager PyTorch of a checkpoint that is open, of which a bundle was made."""
    import torch

    from ..model.modules.running import names_function
    from .eager import EagerEngine

    model = checkpoint.load_model().to(device)
    if threads:
        torch.set_num_threads(threads)
    own = names_function(checkpoint.directory)
    engine = EagerEngine(model, bundle.recipe.top_k, str(checkpoint.directory) if own else "")
    engine.checkpoint = checkpoint
    return engine
