"""Parity: engines against eager PyTorch, sentence by sentence and step by step.

In: a bundle, and the checkpoint it came from or a stored reference. Out: a report of what differs, where, how much.
`cli`, `export.checked` and `bench` use it. The modules, in the order of a run:

- Run: `request` -> `gate` (eager once, then every engine) -> `parity`, whose `check` compares one engine. `corpus` and
  `generated` are the text, `reference` is eager's side, in memory or in a file, `restricted` eager with a shortlist.
- Observe: `observe` feeds and decodes, `recording` keeps what a search decides. `sizes`, `walks`, `vocabulary`,
  `memory` and `defaults` add large batches and beams, other rows, every entry, the encoder's output, and text.
- Judge: `compare` (equal, tie or different), `noise` (an engine's own), `rounding` (eager's own), `shares`, `quality`.
- Look inside: `constants`, with `origins` and `programs`; `unrounded`, a variant without its rounding; `blame`, the
  first layer that differs.
- Report: `results` are its parts, `report` is data and text, `page` is HTML, with `figures`.
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
