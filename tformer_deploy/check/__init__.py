"""Parity: engines against eager PyTorch, sentence by sentence and step by step.

In: a bundle, and the checkpoint it came from or a stored reference. Out: a report of what differs, where, how much.
`cli`, `export.checked` and `bench` use it.
"""

from .corpus import GENERATED, Corpus, allowed_by, make_corpus, translations
from .gate import Gate
from .observe import CheckOptions
from .reference import Reference, load_reference
from .report import EngineReport, Report
from .restricted import with_shortlist

__all__ = [
    "GENERATED",
    "CheckOptions",
    "Corpus",
    "EngineReport",
    "Gate",
    "Reference",
    "Report",
    "allowed_by",
    "load_reference",
    "make_corpus",
    "translations",
    "with_shortlist",
]
