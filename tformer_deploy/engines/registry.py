"""The registry of engines: all that the rest of tformer knows of each."""

from __future__ import annotations

from ..base.errors import ConfigError, unknown
from ..bundle.manifest import Bundle
from ..bundle.plans import PRECISIONS, trt_variant
from .spec import EngineSpec

DEVICES = ("cpu", "cuda")
ORT = ("onnxruntime", "onnxruntime-gpu")
NO_PLAN = "plans have no graph for the encoder alone: use --backend ort or eager"
NO_OPENVINO = "OpenVINO does not run the encoder alone: use --backend ort or eager"
NO_CPP = "the C++ runtime runs the encoder alone only of programs: use --backend native or ort"


def require_programs(bundle: Bundle) -> None:
    """Raise ConfigError where a bundle has no program for the C++ library's CPU engine."""
    if not bundle.config.decoder_layers:
        raise ConfigError(f"{bundle.directory} has an encoder alone, for ort and eager: leave out --backend native")
    if not any(recipe.target == "native" for recipe in bundle.variants.values()):
        raise ConfigError(f"{bundle.directory} has no program for native: export it again and add --recipe native-int8")


ENGINES = (
    EngineSpec("eager", "eager PyTorch", packages=("torch",), devices=DEVICES),
    EngineSpec(
        "ort",
        "ONNX Runtime",
        packages=ORT,
        targets=("onnx", "ort-cpu", "trt"),
        devices=DEVICES,
        shortlist_targets=("ort-cpu",),
        checked_at_export=True,
        can_profile=True,
    ),
    EngineSpec(
        "trt",
        "TensorRT",
        packages=("tensorrt", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
        targets=("trt",),
        precisions=PRECISIONS,
        devices=("cuda",),
        plans=True,
        no_encoder=NO_PLAN,
        require=trt_variant,
    ),
    EngineSpec(
        "cpp",
        "the C++ runtime",
        packages=ORT,
        targets=("onnx", "ort-cpu"),
        shortlist_targets=("ort-cpu",),
        measured=False,
        no_encoder=NO_CPP,
    ),
    EngineSpec(
        "native",
        "the C++ runtime",
        targets=("native",),
        shortlist_targets=("native",),
        checked_at_export=True,
        require=require_programs,
    ),
    EngineSpec(
        "openvino",
        "OpenVINO",
        packages=("openvino",),
        targets=("onnx",),
        precisions=("fp32", "bf16"),
        no_encoder=NO_OPENVINO,
    ),
)
"""In the order in which messages and reports list them."""
PACKAGES = tuple(
    dict.fromkeys(("torch", "onnx", *(name for spec in ENGINES for name in spec.packages), "sentencepiece", "numpy"))
)
"""Distributions whose versions decide what comes out."""
BACKENDS = tuple(spec.name for spec in ENGINES)
SHORTLIST_TARGETS = frozenset(target for spec in ENGINES for target in spec.shortlist_targets)
"""Targets whose variants can score the tokens of a shortlist alone."""


def find(backend: str) -> EngineSpec:
    """The engine of a backend. Raises ConfigError."""
    for spec in ENGINES:
        if spec.name == backend:
            return spec
    raise unknown("backend", backend, BACKENDS)
