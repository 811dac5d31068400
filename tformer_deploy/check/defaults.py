"""Compares text with text, with the model's own tokenizers and default options, which no graph contains."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.files import sha256
from ..base.headers import digest
from ..base.settings import from_dict
from ..bundle.manifest import Bundle
from ..bundle.text import Tokenizers
from ..decoding import DecodeOptions
from ..decoding.options import over_defaults
from ..engines.base import Engine
from .observe import CheckOptions, by_length, spread
from .recording import Run, record
from .sizes import has_room

LINES = 8
"""Lines that are translated: a wrong tokenizer or option shows in the first ones."""
FILES = (" file", " entries")
"""Endings of the settings that name a tokenizer's file."""


@dataclass(frozen=True)
class Defaults:
    """Some lines, and their translation by eager PyTorch with the checkpoint's own tokenizers and options."""

    lines: list[str]
    sources: list[list[int]]
    """Source ids of each line."""
    decoding: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's default options."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """Its settings and the SHA-256 of its files, see `described`."""
    texts: list[str] = field(default_factory=list)
    """Translation of each line."""
    run: Run = field(default_factory=Run)


def make_defaults(
    eager: Engine,
    lines: Sequence[str],
    tokenizers: Tokenizers,
    decoding: Mapping[str, Any],
    options: CheckOptions,
    longest: int,
) -> Defaults:
    """Translate some of those `lines` that are not too long, by an entered eager."""
    known = [(line, tokenizers.source_ids(line.strip())) for line in lines if line.strip()]
    fitting = [(line, ids) for line, ids in known if 0 < len(ids) <= longest]
    picked = [fitting[i] for i in sorted(spread([ids for _, ids in fitting], LINES))]
    about = dict(decoding), described(tokenizers)
    found = Defaults([line for line, _ in picked], [ids for _, ids in picked], *about)
    run = run_defaults(eager, found, options)
    if len(run.outputs) < len(picked):
        return Defaults([], [], *about)
    texts = [tokenizers.target_text(run.outputs[i][0].ids) for i in range(len(picked))]
    return dataclasses.replace(found, texts=texts, run=run)


def decoding_of(defaults: Defaults, options: CheckOptions) -> DecodeOptions:
    """The defaults, with outputs no longer than others of a check."""
    found = from_dict(DecodeOptions, defaults.decoding, "decoding")
    most = min(found.max_tokens, options.max_tokens)
    return dataclasses.replace(found, max_tokens=most, min_tokens=min(found.min_tokens, most))


def run_defaults(engine: Engine, defaults: Defaults, options: CheckOptions) -> Run:
    """Decode the lines with the default options; nothing if the engine cannot."""
    return _run(engine, defaults.sources, options, decoding_of(defaults, options))


def translate(engine: Engine, sources: Sequence[Sequence[int]], defaults: Defaults, options: CheckOptions) -> Run:
    """Decode a whole text with the default options, and no more beams than every engine has; nothing if it cannot."""
    own = decoding_of(defaults, options)
    asked = {"max_tokens": own.max_tokens, "min_tokens": own.min_tokens, "beams": min(own.beams, options.own_beams)}
    return _run(engine, sources, options, over_defaults(defaults.decoding, {**asked, "n_best": 1, "align": False}))


def _run(engine: Engine, sources: Sequence[Sequence[int]], options: CheckOptions, decoding: DecodeOptions) -> Run:
    run, longest = Run(), max(map(len, sources), default=0)
    if decoding.rows <= engine.limits.beams and has_room(engine, decoding, longest) and able(engine, decoding):
        for batch, indices in by_length(engine, sources, range(len(sources)), options, decoding):
            record(engine, batch, indices, decoding, run)
    return run


def able(engine: Engine, decoding: DecodeOptions) -> bool:
    """Whether an engine has the attention that options ask for."""
    return engine.attention or not decoding.attention


def described(tokenizers: Tokenizers) -> dict[str, Any]:
    """Every setting of both sides, by a unique name, and the SHA-256 of their files."""
    with tempfile.TemporaryDirectory() as folder:
        sides = tokenizers.save(Path(folder))
        files = {file.name: sha256(file) for file in sorted(Path(folder).iterdir())}
    settings = {f"{side} {key}": value for side, found in sides.items() for key, value in found.items()}
    return {**settings, **files}


def other_text(bundle: Bundle, defaults: Defaults) -> list[str]:
    """One line for each difference between bundle and checkpoint: default options, tokenizer settings, ids, text."""
    tokenizers = bundle.tokenizers()
    contents = [by_content(each) for each in (described(tokenizers), defaults.tokenizer)]
    names = {f"{side} {key}": each[key] for side, each in bundle.manifest["tokenizer"].items() for key in each}
    names = {key: name for key, name in names.items() if key.endswith(FILES)}
    found = [
        *differing("default of decoding", bundle.decoding, defaults.decoding),
        *dict.fromkeys(differing("tokenizer", contents[0], contents[1], names)),
    ]
    for number, (line, ids) in enumerate(zip(defaults.lines, defaults.sources, strict=True), 1):
        own, made = tokenizers.source_ids(line.strip()), defaults.run.outputs[number - 1][0].ids
        text, own_text = defaults.texts[number - 1], tokenizers.target_text(made)
        for prefix, mine, theirs in (("", own, ids), ("the output of ", own_text, text)):
            if mine != theirs:
                sides = f"{mine!r:.60} to the bundle, {theirs!r:.60} to the checkpoint"
                return [*found, f"text: {prefix}line {number}, {line!r:.40}, is {sides}"]
    return found


def by_content(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """`described`, with the SHA-256 of each side's files in place of their names."""
    settings = {key: value for key, value in tokenizer.items() if " " in key}
    return settings | {key: tokenizer.get(str(name)) for key, name in settings.items() if key.endswith(FILES)}


def differing(
    setting: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> list[str]:
    """One line for each setting that differs between bundle and checkpoint; `names`: how to call some of them."""
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        if digest({"value": ours.get(name)}) != digest({"value": theirs.get(name)}):
            sides = [f"{side[name]!r:.60}" if name in side else "not set" for side in (ours, theirs)]
            found.append(
                f"{setting}, {(names or {}).get(name, name)}: {sides[0]} in the bundle, {sides[1]} in the checkpoint"
            )
    return found


def lines_of(sources: Sequence[Sequence[int]], tokenizers: Tokenizers) -> list[str]:
    """Generated sources as text, which may have other ids when it is tokenized.

    Ids of a model's padding of its vocabulary, which its tokenizer does not have, are left out.
    """
    size = tokenizers.source.size
    return [
        tokenizers.source.decode([token for token in sources[i] if token < size]) for i in spread(sources, 2 * LINES)
    ]
