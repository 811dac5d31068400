"""Who is compared, and every setting that is tried to find each one's best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .points import Point

Setting = dict[str, Any]
"""What a process is started with; `env` goes to its environment."""
OURS = ("ort", "native")
"""How the names of our sides begin."""
PACKED = {"CT2_USE_EXPERIMENTAL_PACKED_GEMM": "1"}


@dataclass(frozen=True)
class Side:
    """A library at one kind of precision."""

    name: str
    program: str
    """Module of this package that runs it."""
    settings: list[Setting]

    @property
    def ours(self) -> bool:
        """Ours must not fail."""
        return self.name.startswith(OURS)


def ctranslate2_sides(types: Iterable[str], cores: int) -> list[Side]:
    """float32, and all that is smaller: the compute types that this processor has."""
    pairs = _unique((1, 1), (cores, 1), (1, cores))

    def settings(compute_types: list[str]) -> list[Setting]:
        return [
            {"compute_type": kind, "intra_threads": intra, "inter_threads": inter}
            for kind in compute_types
            for intra, inter in pairs
        ]

    small = [kind for kind in ("int8", "int8_float32", "int8_bfloat16", "bfloat16") if kind in types]
    first = settings(small[:1])
    packed = [{**setting, "env": PACKED} for setting in first if setting["intra_threads"] == 1]
    # It picks AVX2 on some processors whose AVX-512 is faster.
    forced = [{**setting, "env": {"CT2_FORCE_CPU_ISA": "AVX512"}} for setting in first]
    return [
        Side("CTranslate2 int8", "run_ctranslate2", settings(small) + packed + forced),
        Side("CTranslate2 float32", "run_ctranslate2", settings(["float32"])),
    ]


def eager_sides(cores: int, env: dict[str, str], compiled: bool) -> list[Side]:
    """PyTorch with cached steps in two precisions; compiled too, which is tried with one worker only."""
    pairs = [(threads, workers, False) for threads, workers in _unique((1, 1), (cores, 1), (1, cores))]
    pairs += [(cores, 1, True)] * compiled
    return [
        Side(
            f"eager PyTorch {dtype}",
            "run_tformer",
            [
                {
                    "engine": "eager",
                    "dtype": dtype,
                    "threads": threads,
                    "workers": workers,
                    "compiled": compile_it,
                    # torch keeps the number of threads of the thread that sets it only.
                    "env": {**env, "OMP_NUM_THREADS": str(threads)},
                }
                for threads, workers, compile_it in pairs
            ],
        )
        for dtype in ("float32", "bfloat16")
    ]


def our_sides(engines: Iterable[str], cores: int) -> list[Side]:
    """ONNX Runtime: all cores on one batch, or a thread for each part of it."""
    pairs = _unique((cores, 1), (1, cores))
    return [
        Side(
            engine,
            "run_tformer",
            [{"engine": engine, "threads": threads, "workers": workers} for threads, workers in pairs],
        )
        for engine in engines
    ]


def library_sides(variants: Iterable[str], cores: int, library: str) -> list[Side]:
    """The C++ runtime's own engine, its search in C++ as well."""
    pairs = _unique((cores, 1), (1, cores))
    shared = {"library": library, "backend": "native"}
    return [
        Side(
            f"native {variant}",
            "run_library",
            [{**shared, "variant": variant, "threads": threads, "workers": workers} for threads, workers in pairs],
        )
        for variant in variants
    ]


def batchings(side: Side, setting: Setting, point: Point, quick: bool = False) -> list[Setting]:
    """How the sources may be cut into batches, in the words of the side."""
    if side.program in ("run_tformer", "run_library"):
        tokens = (4096,) if quick else (1024, 2048, 4096, 8192)
        return [{"batch_tokens": size} for size in tokens] if point.corpus else [{}]
    if not point.corpus:
        return [{"max_batch_size": -(-len(point.sources) // setting["inter_threads"])}]
    kinds = {"examples": (32,)} if quick else {"examples": (16, 32, 64), "tokens": (1024, 2048, 4096, 8192)}
    return [{"max_batch_size": size, "batch_type": kind} for kind, sizes in kinds.items() for size in sizes]


def _unique(*pairs: tuple[int, int]) -> list[tuple[int, int]]:
    return list(dict.fromkeys(pairs))
