"""The text of a check: lines of a file or generated sources, within the sizes that all engines take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..base.errors import ConfigError, DataError
from ..base.lines import read_lines
from ..bundle.manifest import Bundle
from ..bundle.recipe import Axes, Recipe, narrowest
from ..bundle.text import Tokenizers
from ..engines import limits_of
from ..model.config import ModelConfig
from .generated import generated_sources
from .observe import CheckOptions

GENERATED = CheckOptions(max_tokens=32, invariance=12, sentences=300)
"""For generated sources. Outputs are short, as those of random sources may run to the last position. 300 sentences show
a fault in 1 of 100 with 95 %."""


@dataclass
class Corpus:
    """The sources of a check."""

    name: str
    sources: list[list[int]]
    """Ids as the encoder sees them."""
    options: CheckOptions
    lines: list[str] = field(default_factory=list)
    """Their text; empty: they are generated."""


def make_corpus(
    config: ModelConfig,
    recipe: Recipe,
    tokenizers: Tokenizers,
    src: Path | None,
    options: CheckOptions | None = None,
    seed: int = 0,
) -> Corpus:
    """The non-empty lines of a file, or generated sources by `seed`.

    Raises DataError where a file has no text or a line is too long.
    """
    longest = recipe.axes.src_len.max
    if src is None:
        sources = generated_sources(config.src_vocab, config.eos_id, longest, seed)
        return Corpus("generated sources", sources, options or GENERATED)
    found, lines = [], []
    for number, line in enumerate(read_lines(src), 1):
        ids = tokenizers.source_ids(line)
        if len(ids) > longest:
            raise DataError(f"{src}:{number}: a source of {len(ids)} tokens exceeds the limit of {longest}: shorten it")
        if line:
            found.append(ids)
            lines.append(line)
    if not found:
        raise DataError(f"{src}: no line with text: give a file with a sentence a line")
    return Corpus(src.name, found, options or CheckOptions(), lines)


def translations(src: Path | None, tgt: Path) -> list[str]:
    """Reference translations, without those of empty source lines. Raises ModuleNotFoundError without sacrebleu."""
    from ..train.metrics import corpus_bleu  # noqa: F401

    lines = read_lines(tgt)
    sources = read_lines(src) if src else lines
    if len(sources) != len(lines):
        raise ConfigError(f"{src} has {len(sources)} lines, {tgt} {len(lines)}: they must be parallel")
    return [line for source, line in zip(sources, lines, strict=True) if source]


def allowed_by(names: Sequence[str], bundle: Bundle) -> Recipe:
    """The bundle's recipe, its axes narrowed to what every variant and engine takes."""
    allowed = narrowest([bundle.recipe, *bundle.variants.values()])
    for name in names:
        limits, axes = limits_of(name, bundle), allowed.axes
        sizes = {
            "batch": limits.batch,
            "beams": limits.beams,
            "src_len": limits.src_tokens,
            "past_len": limits.tgt_tokens - 1,
        }
        within = {axis: getattr(axes, axis).within(size) for axis, size in sizes.items()}
        allowed = dataclasses.replace(allowed, axes=Axes(**within))
    return allowed
