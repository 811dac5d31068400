"""What runs a bundle's model. Each engine is one line of `registry.ENGINES`.

In: a bundle and a name such as `ort:int8@cuda`. Out: an object of `engines.base.Engine`.
`decoding`, `translate`, `serve`, `check` and `bench` use it; of `export`, only `checked`, `build` and `trt_builder` do.
"""

from .make import (
    MOST_BATCH_TOKENS,
    limits_of,
    load_exported,
    load_runtime,
    make_encoder,
    make_engine,
    most_parallel,
    threads_each,
)
from .names import (
    EngineName,
    check_backend,
    check_checkpoint,
    check_name,
    encoder_names,
    engine_name,
    engine_names,
    expand,
    explain,
    exported_engines,
    recipe_of,
    require_each,
)
from .registry import BACKENDS, ENGINES, PACKAGES, SHORTLIST_TARGETS
from .spec import STANDARD

__all__ = [
    "BACKENDS",
    "ENGINES",
    "MOST_BATCH_TOKENS",
    "PACKAGES",
    "SHORTLIST_TARGETS",
    "STANDARD",
    "EngineName",
    "check_backend",
    "check_checkpoint",
    "check_name",
    "encoder_names",
    "engine_name",
    "engine_names",
    "expand",
    "explain",
    "exported_engines",
    "limits_of",
    "load_exported",
    "load_runtime",
    "make_encoder",
    "make_engine",
    "most_parallel",
    "recipe_of",
    "require_each",
    "threads_each",
]
