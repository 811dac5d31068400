"""Eager PyTorch's outputs for a corpus, in memory or in a file for machines without torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import ArtifactError, ConfigError
from ..base.files import output_file
from ..base.headers import DAMAGED, digest, parse_json, read_arrays
from ..base.notes import Progress, unseen
from ..base.settings import from_dict
from ..decoding import Hypothesis
from ..engines.base import Encoder, Engine
from .compare import DEFAULTS, WIDE
from .defaults import Defaults
from .memory import read_memory
from .observe import ENCODER_SENTENCES, JOINED, REBATCHED, CheckOptions, Observation, observe, other_batches, spread
from .recording import Run, Trace, record_joined
from .rounding import Rounding
from .sizes import run_wide, wide_beam, wide_sentences
from .vocabulary import PROBES, SIDES, Vocabulary, read_vocabulary

VERSION = 5
TEXT = ("lines", "decoding", "tokenizer", "texts")
"""Fields of `Defaults` in the header."""
TRANSLATED = "translated"
MOST_AXES = 4
"""Of an array in the file."""


@dataclass
class Reference:
    """Eager's side of a check."""

    sources: list[list[int]]
    options: CheckOptions
    corpus: str
    weights_sha256: str
    machine: dict[str, str]
    observed: Observation
    shortlist: str = ""
    """File of the shortlists that eager used, see `Gate.shortlist`."""
    variants: dict[str, dict[str, Run]] = field(default_factory=dict)
    """Runs of the invariance check, by variant and mode."""
    defaults: Defaults | None = None
    """Text with the model's own tokenizers and options."""
    translated: Run | None = None
    """The whole text with those options, once it was asked for, see `quality.add_translation`."""
    rounding: Rounding | None = None
    """Eager's own rounding error, once measured, see `Gate.rounding`."""

    def save(self, path: Path) -> None:
        """Write a file that `load_reference` reads."""
        known = Rounding() if self.rounding is None else self.rounding  # which may be no more than a reason
        header = {
            "format": "tformer-reference",
            "version": VERSION,
            "options": dataclasses.asdict(self.options),
            "layers": list(self.observed.layers),
            "late": list(self.observed.late),
            "rounding": {name: each for name, each in vars(known).items() if each} or None,
            **{name: getattr(self, name) for name in ("corpus", "weights_sha256", "machine", "shortlist")},
        }
        arrays: dict[str, Any] = {}
        if self.defaults:
            header["defaults"] = {name: getattr(self.defaults, name) for name in TEXT}
            _pack(arrays, f"{DEFAULTS}.sources", [np.array(source, np.int32) for source in self.defaults.sources])
        _pack(arrays, "sources", [np.array(source, np.int32) for source in self.sources])
        _pack(arrays, "probe_ids", self.observed.probe_ids)
        _pack(arrays, "probes", self.observed.probes)
        _pack(arrays, "layers", list(self.observed.layers.values()))
        _pack(arrays, "late", list(self.observed.late.values()))
        arrays["encoder.sentences"] = np.array(list(self.observed.encoder), np.int32)
        _pack(arrays, "encoder", [array for arrays_ in self.observed.encoder.values() for array in arrays_])
        arrays["memory.sentences"] = np.array(list(self.observed.memory), np.int32)
        _pack(arrays, "memory", list(self.observed.memory.values()))
        arrays["attention.sentences"] = np.array(list(self.observed.attention), np.int32)
        _pack(arrays, "attention", list(self.observed.attention.values()))
        if self.observed.vocabulary:
            for side in SIDES:
                arrays[f"vocabulary.{side}"] = getattr(self.observed.vocabulary, side)
        for name, run in _runs(self).items():
            _pack_run(arrays, name, run)
        header["sha256"] = _fingerprint(header, arrays)
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with output_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)


def make_reference(
    eager: Engine,
    sources: Sequence[Sequence[int]],
    options: CheckOptions,
    about: dict[str, Any],
    progress: Progress = unseen,
    encoder: Encoder | None = None,
) -> Reference:
    """Run eager PyTorch, entered, over a corpus. `about`: corpus, weights_sha256, machine, shortlist.

    `encoder`: returns the encoder's output, entered as well.
    """
    options = options.within(eager.limits)
    observed = observe(eager, sources, options, None, progress)
    observed.wide = run_wide(eager, sources, options)
    if encoder and encoder.encodes:
        observed.memory = read_memory(encoder, sources, together=1)
    if options.vocabulary and sources:
        observed.vocabulary = read_vocabulary(eager)
    variants = run_variants(eager, sources, options, progress)
    return Reference([list(source) for source in sources], options, observed=observed, variants=variants, **about)


def run_variants(
    engine: Engine,
    sources: Sequence[Sequence[int]],
    options: CheckOptions,
    progress: Progress,
) -> dict[str, dict[str, Run]]:
    """Decode some sentences again in other batches."""
    found: dict[str, dict[str, Run]] = {}
    picked = rebatched(sources, options)
    for variant in (*REBATCHED, *([JOINED] if engine.admits else [])) if picked else ():
        found[variant] = {}
        for mode, decoding in options.modes().items():
            run = found[variant][mode] = Run()
            batches = other_batches(variant, engine, sources, picked, options, decoding)
            for together in [list(batches)] if variant == JOINED else ([batch] for batch in batches):
                record_joined(engine, together, decoding, run)
                progress(sum(len(indices) for _, indices in together))
    return found


def rebatched(sources: Sequence[Sequence[int]], options: CheckOptions) -> list[int]:
    """The sentences of the invariance check."""
    return spread(sources[: options.searched or len(sources)], options.invariance)


def load_reference(path: Path) -> Reference:
    """Read what `Reference.save` wrote. Raises ArtifactError."""
    if not path.is_file():
        raise ArtifactError(f"{path}: no such reference: make one with tformer check --save-reference {path}")
    try:
        arrays = read_arrays(path)
        header = parse_json(bytes(arrays["header"]).decode())
        _check_version(path, header)
        reference = Reference(
            [source.tolist() for source in _unpack(arrays, "sources")],
            from_dict(CheckOptions, header["options"], "options"),
            header["corpus"],
            header["weights_sha256"],
            header["machine"],
            _read_observation(arrays, header),
            header["shortlist"],
            rounding=from_dict(Rounding, header["rounding"], "rounding") if header["rounding"] else None,
        )
        _check_sentences(reference)
        _read_runs(arrays, header, reference)
        if header["sha256"] != _fingerprint(header, arrays):
            raise ValueError("it does not match its own SHA-256")
        return reference
    except (*DAMAGED, ConfigError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): make it again with --save-reference") from None


def _check_version(path: Path, header: dict[str, Any]) -> None:
    if header["format"] != "tformer-reference":
        raise ArtifactError(f"{path} is not a reference of tformer check: make one with --save-reference")
    if header["version"] < VERSION:
        raise ArtifactError(
            f"{path} has version {header['version']}, older than {VERSION}: make it again with --save-reference"
        )
    if header["version"] > VERSION:
        raise ArtifactError(f"{path} has version {header['version']}, newer than {VERSION}: update tformer-deploy")


def _read_observation(arrays: dict[str, Any], header: dict[str, Any]) -> Observation:
    """What was recorded under teacher forcing."""
    sentences = arrays["encoder.sentences"].tolist()
    encoder = _unpack(arrays, "encoder")
    each = len(encoder) // max(1, len(sentences))
    return Observation(
        probe_ids=_unpack(arrays, "probe_ids"),
        probes=_unpack(arrays, "probes"),
        encoder={i: encoder[n * each : (n + 1) * each] for n, i in enumerate(sentences)},
        attention=dict(zip(arrays["attention.sentences"].tolist(), _unpack(arrays, "attention"), strict=True)),
        memory=dict(zip(arrays["memory.sentences"].tolist(), _unpack(arrays, "memory"), strict=True)),
        layers=dict(zip(header["layers"], _unpack(arrays, "layers"), strict=True)),
        late=dict(zip(header["late"], _unpack(arrays, "late"), strict=True)),
    )


def _check_sentences(reference: Reference) -> None:
    """Raise ValueError if arrays belong to other sentences than they should."""
    observed, count = reference.observed, len(reference.sources)
    encoded = sorted(spread(reference.sources, ENCODER_SENTENCES))
    if (
        [probes.shape for probes in observed.probes] != [ids.shape for ids in observed.probe_ids]
        or len(observed.probes) != count + bool(count)
        or sorted(observed.encoder) != encoded
        or sorted(observed.attention) not in ([], encoded)  # not every module of a user's own notes it
        or sorted(observed.memory) not in ([], encoded)
    ):
        raise ValueError("its parts do not fit each other")


def _read_runs(arrays: dict[str, Any], header: dict[str, Any], reference: Reference) -> None:
    """Add what was decoded, and the vocabularies."""
    observed, options, sources = reference.observed, reference.options, reference.sources
    picked = rebatched(sources, options)
    for mode in options.modes():
        observed.runs[mode] = _unpack_run(arrays, mode, options.of_mode(mode, len(sources)))
        for variant in REBATCHED if picked else ():
            runs = reference.variants.setdefault(variant, {})
            runs[mode] = _unpack_run(arrays, f"{variant}.{mode}", picked)
    if wide_beam(options) and sources:
        observed.wide = _unpack_run(arrays, WIDE, wide_sentences(sources))
    if "defaults" in header:
        reference.defaults = _read_defaults(arrays, header["defaults"])
    if f"{TRANSLATED}.sentences" in arrays:
        reference.translated = _unpack_run(arrays, TRANSLATED, range(len(sources)))
    if options.vocabulary and sources:
        sides = [arrays[f"vocabulary.{side}"] for side in SIDES]
        if any(side.ndim != 2 or side.shape[1] != PROBES or side.dtype != np.float32 for side in sides):
            raise ValueError("its vocabularies have another form")
        observed.vocabulary = Vocabulary(*sides)


def _read_defaults(arrays: dict[str, Any], header: dict[str, Any]) -> Defaults:
    """Text with the model's own options."""
    sources = [source.tolist() for source in _unpack(arrays, f"{DEFAULTS}.sources")]
    defaults = Defaults(sources=sources, run=_unpack_run(arrays, DEFAULTS, range(len(sources))), **header)
    if not len(sources) == len(defaults.lines) == len(defaults.texts):
        raise ValueError("its lines of text do not fit each other")
    return defaults


def _fingerprint(header: dict[str, Any], arrays: dict[str, Any]) -> str:
    """Hex SHA-256 of a header, without its own `sha256`, and of the arrays."""
    found = hashlib.sha256(digest(header).encode())
    for name in sorted(arrays.keys() - {"header"}):
        found.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        found.update(np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()


def _runs(reference: Reference) -> dict[str, Run]:
    names = {f"{variant}.{mode}": run for variant, runs in reference.variants.items() for mode, run in runs.items()}
    wide = {WIDE: reference.observed.wide} if reference.observed.wide else {}
    text = {DEFAULTS: reference.defaults.run} if reference.defaults else {}
    whole = {TRANSLATED: reference.translated} if reference.translated else {}
    return {**reference.observed.runs, **wide, **text, **whole, **names}


def _pack(arrays: dict[str, Any], name: str, values: Sequence[np.ndarray]) -> None:
    """Arrays of one type, as one flat array, their ranks and their sizes."""
    arrays[f"{name}.ranks"] = np.array([value.ndim for value in values], np.int64)
    arrays[f"{name}.sizes"] = np.array([size for value in values for size in value.shape], np.int64)
    arrays[f"{name}.flat"] = np.concatenate([value.ravel() for value in values]) if values else np.zeros(0)


def _unpack(arrays: dict[str, Any], name: str) -> list[Any]:
    flat, found, start = arrays[f"{name}.flat"], [], 0
    sizes = iter(arrays[f"{name}.sizes"].tolist())
    ranks = arrays[f"{name}.ranks"].tolist()
    if not all(0 <= rank <= MOST_AXES for rank in ranks):
        raise ValueError(f"{name} has arrays of {max(ranks)} axes")
    for rank in ranks:
        shape = [next(sizes, -1) for _ in range(rank)]
        end = start + math.prod(shape)
        found.append(flat[start:end].reshape(shape))
        start = end
    if start != len(flat):
        raise ValueError(f"{name} has {len(flat)} numbers, its shapes {start}")
    return found


def _pack_run(arrays: dict[str, Any], name: str, run: Run) -> None:
    hypotheses = [h for outputs in run.outputs.values() for h in outputs]
    arrays[f"{name}.sentences"] = np.array(list(run.outputs), np.int32)
    arrays[f"{name}.counts"] = np.array([len(outputs) for outputs in run.outputs.values()], np.int32)
    _pack(arrays, f"{name}.ids", [np.array(h.ids, np.int32) for h in hypotheses])
    numbers = [(h.score, h.value, -1 if h.end_id is None else h.end_id) for h in hypotheses]
    arrays[f"{name}.numbers"] = np.array(numbers, np.float64)
    for part in ("parents", "tokens", "values", "margins"):
        _pack(arrays, f"{name}.{part}", [getattr(run.traces[i], part) for i in run.outputs])


def _unpack_run(arrays: dict[str, Any], name: str, expected: Iterable[int]) -> Run:
    hypotheses = [
        Hypothesis(ids.tolist(), int(end) if end >= 0 else None, score, value)
        for ids, (score, value, end) in zip(
            _unpack(arrays, f"{name}.ids"), arrays[f"{name}.numbers"].tolist(), strict=True
        )
    ]
    sentences = arrays[f"{name}.sentences"].tolist()
    if sorted(sentences) != sorted(expected):
        raise ValueError(f"{name} has other sentences")
    ends = np.cumsum(arrays[f"{name}.counts"]).tolist()
    if ends[-1:] not in ([], [len(hypotheses)]):
        raise ValueError(f"{name} has {len(hypotheses)} outputs")
    parts = [_unpack(arrays, f"{name}.{part}") for part in ("parents", "tokens", "values", "margins")]
    return Run(
        {i: hypotheses[start:end] for i, start, end in zip(sentences, [0, *ends], ends, strict=False)},
        {i: Trace(*trace) for i, *trace in zip(sentences, *parts, strict=True)},
    )
