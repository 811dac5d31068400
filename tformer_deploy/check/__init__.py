"""Parity: engines against eager PyTorch, sentence by sentence and step by step.

In: a bundle, and the checkpoint it came from or a stored reference. Out: a report of what differs, where, how much.
`cli`, `export.checked` and `bench` use it.
"""

from .corpus import GENERATED, Corpus, allowed_by, make_corpus, translations
from .gate import Gate
from .observe import CheckOptions
from .reference import Reference, load_reference
from .report import EngineReport, Report
from .request import CheckRequest, run_check
from .restricted import asked_engines

__all__ = [
    "GENERATED",
    "CheckOptions",
    "CheckRequest",
    "Corpus",
    "EngineReport",
    "Gate",
    "Reference",
    "Report",
    "allowed_by",
    "asked_engines",
    "load_reference",
    "make_corpus",
    "run_check",
    "translations",
]
