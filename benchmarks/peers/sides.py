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
PACKED = {"CT2_PACKED_GEMM": "1"}
LIMITS = {
    "": {},
    "avx512": {
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "CT2_FORCE_CPU_ISA": "AVX512",
    },
    "avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "CT2_FORCE_CPU_ISA": "AVX2"},
}
"""Instruction sets that may be used at most, and what keeps CTranslate2 and its libraries to them."""


@dataclass(frozen=True)
class Side:
    """A library at one kind of precision."""

    name: str
    program: str
    """Module of this package that runs it."""
    settings: list[Setting]
    limit: str = ""
    """Of `LIMITS`; sides of one limit are compared."""
    greedy: bool = False
    """Whether it cannot search with beams."""

    @property
    def ours(self) -> bool:
        """Ours must not fail."""
        return self.name.startswith(OURS)

    def can(self, point: Point) -> bool:
        """Whether a point is one that it decodes."""
        return point.beams == 1 or not self.greedy


def ctranslate2_sides(
    types: Iterable[str], cores: int, instructions: Iterable[str], limits: Iterable[str] = ()
) -> list[Side]:
    """float32, and all that is smaller: the compute types that this processor has. With a limit int8 alone."""
    pairs = _unique((1, 1), (cores, 1), (1, cores))

    def settings(compute_types: list[str], *environments: dict[str, str]) -> list[Setting]:
        return [
            {"compute_type": kind, "intra_threads": intra, "inter_threads": inter} | ({"env": env} if env else {})
            for env in environments or ({},)
            for kind in compute_types
            for intra, inter in pairs
        ]

    small = [kind for kind in ("int8", "int8_float32", "int8_bfloat16", "bfloat16") if kind in types]
    # It picks AVX2 on some processors whose AVX-512 is faster, and has products of MKL, packed or not, and of oneDNN,
    # which it takes by itself on AMD's. MKL uses AMX by itself, which is slower where rows are few.
    largest = "avx512" if "avx512f" in instructions else "avx2"
    faster = {"CT2_FORCE_CPU_ISA": largest.upper()}
    libraries = ({"CT2_USE_MKL": "0"}, {"CT2_USE_MKL": "1"})
    tuned = settings(small[:1], faster, faster | PACKED, *(faster | each for each in libraries), LIMITS[largest])
    return [
        Side("CTranslate2 int8", "run_ctranslate2", settings(small) + tuned),
        Side("CTranslate2 float32", "run_ctranslate2", settings(["float32"])),
        *(
            Side(f"CTranslate2 int8, {limit}", "run_ctranslate2", settings(small[:1], env, env | PACKED), limit)
            for limit, env in LIMITS.items()
            if limit in limits
        ),
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


def library_sides(variants: Iterable[str], cores: int, library: str, limits: Iterable[str] = ()) -> list[Side]:
    """The C++ runtime's own engine, its search in C++ as well; also with kernels of other instruction sets."""
    pairs = _unique((cores, 1), (1, cores))
    shared = {"library": library, "backend": "native"}
    return [
        Side(
            f"native {variant}, {limit}" if limit else f"native {variant}",
            "run_library",
            [
                {**shared, "variant": variant, "threads": threads, "workers": workers}
                | ({"kernels": limit} if limit else {})
                for threads, workers in pairs
            ],
            limit,
        )
        for limit in ("", *limits)
        for variant in variants
    ]


def openvino_sides(cores: int) -> list[Side]:
    """The standard graphs in OpenVINO, in fp32 and in the precision that it chooses itself where there is bf16."""
    threads = dict.fromkeys((1, cores))
    settings = [{"precision": kind, "threads": count} for kind in ("f32", "bf16") for count in threads]
    return [Side("OpenVINO", "run_openvino", settings, greedy=True)]


def batchings(side: Side, setting: Setting, point: Point, quick: bool = False) -> list[Setting]:
    """How the sources may be cut into batches, in the words of the side."""
    if side.program in ("run_tformer", "run_library"):
        tokens = (4096,) if quick else (512, 1024, 2048, 4096, 8192)
        return [{"batch_tokens": size} for size in tokens] if point.corpus else [{}]
    if not point.corpus:
        return [{"max_batch_size": -(-len(point.sources) // setting.get("inter_threads", 1))}]
    if side.program == "run_openvino":
        return [{"max_batch_size": size} for size in ((64,) if quick else (32, 64, 128))]
    kinds = {"examples": (32,)} if quick else {"examples": (16, 32, 64), "tokens": (1024, 2048, 4096, 8192)}
    return [{"max_batch_size": size, "batch_type": kind} for kind, sizes in kinds.items() for size in sizes]


def _unique(*pairs: tuple[int, int]) -> list[tuple[int, int]]:
    return list(dict.fromkeys(pairs))
