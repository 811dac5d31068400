"""Runs one engine over a corpus and records everything that is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice

import numpy as np

from ..base.errors import ConfigError, EngineError, MissingExtra, ParityError
from ..base.notes import Progress, unseen
from ..base.settings import at_least, at_most, check_types
from ..decoding import Batch, DecodeOptions, Hypothesis, forced_steps
from ..decoding.rules import best_tokens
from ..engines.base import Engine, Floats, Ints, Limits, Outlook, Scores
from ..model.config import MAX_SEED
from ..translate.batches import length_batches, make_batch, pad
from .recording import Run, record, room
from .vocabulary import Vocabulary, read_vocabulary

BEST, OTHERS = 16, 48
"""Log-probabilities compared at a step: of the best tokens, and of others that rotate through the vocabulary."""
ENCODER_SENTENCES = 32
"""Sentences whose encoder outputs, and attention if the graph returns it, are compared."""
LATE_LAYERS = ("decoder_embedding", "decoder_layer_0")
"""Layers that are compared at every position, as absolute and relative positions enter there."""
AT_LEAST_ONE = ("max_tokens", "beams", "n_best", "batch_tokens", "own_beams")
"""Numbers among the options that must not be 0; the others may be."""
MAX_OPTION = 1 << 20
"""Upper limit of every number among the options."""
PADDING = 16
"""Columns of padding that the invariance check adds."""
REBATCHED = {
    "alone": "one sentence at a time",
    "neighbours": "short sentences beside long ones",
    "shuffled": "in random order",
    "padded": "more padding",
}
"""Batches of the invariance check, and what each is."""
JOINED = "joined"
"""For engines with continuous batching: groups that join others `recording.JOIN_STEPS` later."""
FORCED = DecodeOptions(max_tokens=1 << 30)
"""Teacher forcing: a target may be as long as the engine allows."""


@dataclass(frozen=True)
class CheckOptions:
    """What a check runs."""

    max_tokens: int = 256
    """Longest output of every mode."""
    beams: int = 5
    """1: no beam search, where a recipe allows no more."""
    n_best: int = 5
    seed: int = 0
    """Of sampling and of the shuffled order."""
    invariance: int = 100
    """Sentences that are decoded again in other batches; 0: none."""
    batch_tokens: int = 1024
    """Padded source tokens of a batch."""
    positions: int = 0
    """Target positions that are scored at least once, however short the outputs are; 0: all that there are."""
    wide: int = 64
    """Size of a wide beam for a few sentences, limited by the recipe; none if that is not above `beams`."""
    large_tokens: int = 4096
    """Padded source tokens times beams of the largest batches, as `translate` counts them; 0: none."""
    vocabulary: bool = True
    """Whether every entry of both vocabularies is fed once."""
    walks: int = 64
    """Widest beam that is fed random tokens, see `walks`; 0: none is."""
    own_beams: int = 1
    """Beam size of the bundle's default options."""
    sentences: int = 0
    """Generated sentences in all, as far as time allows; 0: only the fixed set."""
    searched: int = 0
    """How many sentences, from the first, beam search and sampling decode too; 0: all."""
    seconds: int = 60
    """Time for optional parts: further generated sentences, other beam sizes, late positions."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in (each.name for each in dataclasses.fields(self) if each.name not in ("seed", "vocabulary")):
            at_least(self, name, 1 if name in AT_LEAST_ONE else 0)
            at_most(self, name, MAX_OPTION)
        if self.n_best > self.beams:
            raise ConfigError(f"n_best={self.n_best}: must be at most beams={self.beams}")
        if not 0 <= self.seed < MAX_SEED:
            raise ConfigError(f"seed={self.seed}: must be at least 0 and less than {MAX_SEED}")

    def within(self, limits: Limits) -> CheckOptions:
        """These options, cut down to the limits of an engine."""
        beams = min(self.beams, limits.beams)
        tokens = min(self.max_tokens, limits.tgt_tokens)
        positions = min(self.positions or limits.tgt_tokens, limits.tgt_tokens)
        n_best, wide = min(self.n_best, beams), min(self.wide, limits.beams)
        return dataclasses.replace(self, max_tokens=tokens, beams=beams, n_best=n_best, positions=positions, wide=wide)

    def modes(self) -> dict[str, DecodeOptions]:
        """The ways of decoding that are compared."""
        samples = min(2, self.beams)
        modes = {
            "greedy": DecodeOptions(self.max_tokens),
            "beam": DecodeOptions(self.max_tokens, beams=self.beams, n_best=self.n_best),
            "sampling": DecodeOptions(self.max_tokens, sampling=True, n_best=samples, top_p=0.95, seed=self.seed),
        }
        return {name: options for name, options in modes.items() if name != "beam" or self.beams > 1}

    def of_mode(self, mode: str, sentences: int) -> range:
        """The sentences that a mode decodes, of so many."""
        return range(min(sentences, self.searched or sentences) if mode != "greedy" else sentences)


@dataclass
class Observation:
    """What an engine computed for a corpus."""

    runs: dict[str, Run] = field(default_factory=dict)
    """By mode."""
    probe_ids: list[Ints] = field(default_factory=list)
    """Of each sentence (T, M): tokens whose log-probabilities are compared under teacher forcing.

    One more follows: the sentence of median length, with a target as long as the engine's positions.
    """
    probes: list[Floats] = field(default_factory=list)
    """Of each sentence (T, M): those log-probabilities."""
    best: list[Ints] = field(default_factory=list)
    """Of each sentence (T): the best token of each step under teacher forcing."""
    best_off: float = 0.0
    """Largest difference between the scores of a step's best tokens and its log-probabilities."""
    encoder: dict[int, list[Floats]] = field(default_factory=dict)
    """Of some sentences: cross-attention keys and values, 2L of (H, S, D)."""
    attention: dict[int, Floats] = field(default_factory=dict)
    """Of the same sentences (T, S): attention weights, if the engine returns them."""
    memory: dict[int, Floats] = field(default_factory=dict)
    """Of the same sentences (S, d): the encoder's output; of eager alone, if its model has an encoder of its own."""
    layers: dict[str, Floats] = field(default_factory=dict)
    """Output of every layer for `probe_sentence`."""
    late: dict[str, Floats] = field(default_factory=dict)
    """Output of `LATE_LAYERS` for the same sentence, with a target as long as the engine's positions."""
    wide: Run | None = None
    """A few sentences with a wide beam, see `sizes.run_wide`."""
    vocabulary: Vocabulary | None = None
    """Every entry of both vocabularies."""


def observe(
    engine: Engine,
    sources: Sequence[Sequence[int]],
    options: CheckOptions,
    reference: Observation | None = None,
    progress: Progress = unseen,
) -> Observation:
    """Decode the corpus in every mode and score the greedy outputs of `reference`, or its own."""
    found = Observation()
    for mode, decoding in options.modes().items():
        run = Run()
        for batch, indices in by_length(engine, sources, options.of_mode(mode, len(sources)), options, decoding):
            record(engine, batch, indices, decoding, run)
            progress(len(indices))
        found.runs[mode] = run
    _score(engine, sources, options, reference, found, progress)
    _encode(engine, sources, options, found)
    if sources:
        with suppress(MissingExtra, EngineError):  # the layers are for the report alone
            found.layers = layers_of(engine, *probe_sentence(sources, (reference or found).runs["greedy"]))
            if not reference:
                found.late = late_layers(engine, sources, found.runs["greedy"], options.positions)
    return found


def observe_fed(
    engine: Engine, sources: Sequence[Sequence[int]], options: CheckOptions, reference: Observation
) -> Observation:
    """The part of `observe` without decoding: encoder outputs, probes, every vocabulary entry."""
    found = Observation()
    _score(engine, sources, options, reference, found, unseen)
    _encode(engine, sources, options, found)
    found.vocabulary = read_vocabulary(engine) if reference.vocabulary else None
    return found


def _encode(engine: Engine, sources: Sequence[Sequence[int]], options: CheckOptions, found: Observation) -> None:
    """Fill in the encoder's outputs."""
    for batch, indices in by_length(engine, sources, spread(sources, ENCODER_SENTENCES), options):
        state = engine.encode(batch.src_ids, batch.src_lengths, Outlook(1, 1))
        arrays = engine.cross_keys_values(state)
        for row, i in enumerate(indices):
            found.encoder[i] = [array[row, :, : len(sources[i])].copy() for array in arrays]


def _score(
    engine: Engine,
    sources: Sequence[Sequence[int]],
    options: CheckOptions,
    reference: Observation | None,
    found: Observation,
    progress: Progress,
) -> None:
    """Fill in the probes and the attention."""
    vocab = engine.config.tgt_vocab
    greedy = (reference or found).runs["greedy"]
    targets = [tokens_of(greedy.outputs[i][0]) for i in range(len(sources))]
    if not all(targets):
        raise ParityError(
            f"eager PyTorch has no token for sentence {targets.index([]) + 1}, because its scores are NaN: "
            "check the weights of the checkpoint, or train it again"
        )
    looked_at = set(spread(sources, ENCODER_SENTENCES))
    if sources:
        sources = [*sources, sources[middle(sources)]]
        targets.append(far_target(greedy, engine, min(options.positions, engine.limits.tgt_tokens)))
    best, others = min(BEST, vocab), min(OTHERS, vocab)
    for i, target in enumerate(targets):
        found.probe_ids.append(
            reference.probe_ids[i][: len(target)] if reference else np.empty((len(target), best + others), np.int32)
        )
        found.probes.append(np.empty(found.probe_ids[i].shape, np.float32))
        found.best.append(np.empty(len(target), np.int32))
    for batch, indices in by_length(engine, sources, range(len(sources)), options):
        for step, live, scores in forced_steps(engine, batch, [targets[i] for i in indices], engine.attention):
            assert scores.log_probs is not None
            log_probs = scores.log_probs[:, 0]
            found.best_off = max(found.best_off, best_apart(scores), key=lambda off: (off != off, off))
            top = None if reference else best_tokens(log_probs, best)
            for row, place in enumerate(live.tolist()):
                i = indices[place]
                if top is not None:
                    found.probe_ids[i][step, :best] = top[row]
                    found.probe_ids[i][step, best:] = (7919 * i + step * others + np.arange(others)) % vocab
                found.probes[i][step] = log_probs[row, found.probe_ids[i][step]]
                found.best[i][step] = scores.ids[row, 0, 0]
                if scores.attention is not None and i in looked_at:
                    looked = found.attention.setdefault(i, np.empty((len(targets[i]), len(sources[i])), np.float32))
                    looked[step] = scores.attention[row, 0, : len(sources[i])]
        progress(len(indices))


def best_apart(scores: Scores) -> float:
    """Compare a step's best tokens with its log-probabilities: the same scores, and really the best ones."""
    assert scores.log_probs is not None
    known = scores.ids.clip(0, scores.log_probs.shape[-1] - 1)
    returned = np.where(known == scores.ids, scores.scores, np.nan)
    own = np.take_along_axis(scores.log_probs, known, -1)
    best = np.take_along_axis(scores.log_probs, best_tokens(scores.log_probs, known.shape[-1]), -1)
    return float(np.max([_largest(returned, other) for other in (own, best)]))


def _largest(a: Floats, b: Floats) -> float:
    """The largest difference; minus infinity on both sides is equal."""
    with np.errstate(invalid="ignore"):
        return float(np.where(a == b, 0.0, np.abs(a - b)).max())


def own_choices(
    engine: Engine, sources: Sequence[Sequence[int]], options: CheckOptions, greedy: Run
) -> Observation | None:
    """An engine's scores of its own greedy tokens, in its usual batches; None if an output has no token."""
    if not all(tokens_of(outputs[0]) for outputs in greedy.outputs.values()):
        return None
    found = Observation({"greedy": greedy})
    _score(engine, sources, dataclasses.replace(options, positions=1), None, found, unseen)
    return found


def by_length(
    engine: Engine,
    sources: Sequence[Sequence[int]],
    picked: Sequence[int],
    options: CheckOptions,
    decoding: DecodeOptions = FORCED,
) -> Iterator[tuple[Batch, list[int]]]:
    """Batches of sentences of similar length, as a translator makes them."""
    lengths = [len(sources[i]) for i in picked]
    for places in length_batches(lengths, options.batch_tokens, lambda longest: room(engine, decoding, longest)):
        indices = [picked[place] for place in places]
        yield make_batch([sources[i] for i in indices], engine.config.pad_id, indices), indices


def other_batches(
    variant: str,
    engine: Engine,
    sources: Sequence[Sequence[int]],
    picked: Sequence[int],
    options: CheckOptions,
    decoding: DecodeOptions,
) -> Iterator[tuple[Batch, list[int]]]:
    """The same sentences in other batches, see REBATCHED."""
    if variant == "padded":
        for batch, indices in by_length(engine, sources, picked, options, decoding):
            width = min(batch.src_ids.shape[1] + PADDING, engine.limits.src_tokens)
            if room(engine, decoding, width) < len(indices):
                width = batch.src_ids.shape[1]
            wide = np.full((len(indices), width), engine.config.pad_id, np.int32)
            wide[:, : batch.src_ids.shape[1]] = batch.src_ids
            yield dataclasses.replace(batch, src_ids=wide), indices
        return
    order, size = list(picked), 1
    if variant == "neighbours":
        order.sort(key=lambda i: len(sources[i]))
        ends = zip(order, reversed(order), strict=True)
        order, size = [i for pair in ends for i in pair][: len(order)], 8
    elif variant in ("shuffled", JOINED):
        order = np.random.default_rng(options.seed).permutation(order).tolist()
        size = 16 if variant == "shuffled" else 4
    size = min(size, room(engine, decoding, max(len(sources[i]) for i in order)))
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        yield make_batch([sources[i] for i in indices], engine.config.pad_id, indices), indices


def spread(sources: Sequence[Sequence[int]], count: int) -> list[int]:
    """Indices of up to `count` sentences from the shortest to the longest."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    return [order[place] for place in np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).astype(int))]


def far_target(greedy: Run, engine: Engine, positions: int) -> list[int]:
    """Tokens that eager produced, without end tokens, repeated up to the last position."""
    tokens = [token for outputs in greedy.outputs.values() for token in outputs[0].ids]
    return list(islice(cycle(tokens or end_ids(engine)), positions))


def middle(sources: Sequence[Sequence[int]]) -> int:
    """The index of the sentence of median length."""
    return sorted(range(len(sources)), key=lambda i: len(sources[i]))[len(sources) // 2]


def probe_sentence(sources: Sequence[Sequence[int]], greedy: Run) -> tuple[Sequence[int], list[int]]:
    """The sentence of median length, and eager's greedy output for it."""
    i = middle(sources)
    return sources[i], tokens_of(greedy.outputs[i][0])


def layers_of(engine: Engine, source: Sequence[int], target: Sequence[int]) -> dict[str, Floats]:
    """Output of every layer under teacher forcing, at real positions; the source is padded, to test the mask."""
    length = len(source)
    width = min(length + PADDING, engine.limits.src_tokens)
    src_ids = np.full((1, width), engine.config.pad_id, np.int32)
    src_ids[0, :length] = source
    tgt_ids = pad([np.array([engine.config.start_id, *target[:-1]], np.int32)], engine.config.pad_id)
    found = engine.layers(src_ids, np.array([length], np.int32), tgt_ids)
    real = {}
    for name, values in found.items():
        if name.startswith("cross_"):
            real[name] = values[0, :, :length].copy()
        else:
            real[name] = (
                values[0, :length].copy() if name.startswith("encoder") or name == "memory" else values[0].copy()
            )
    return real


def late_layers(engine: Engine, sources: Sequence[Sequence[int]], greedy: Run, positions: int) -> dict[str, Floats]:
    """Output of `LATE_LAYERS` for the sentence of median length, at every position of the engine."""
    target = far_target(greedy, engine, min(positions, engine.limits.tgt_tokens))
    layers = layers_of(engine, sources[middle(sources)], target)
    return {name: layers[name] for name in LATE_LAYERS if name in layers}


def tokens_of(output: Hypothesis) -> list[int]:
    """An output with its end token."""
    return [*output.ids, output.end_id] if output.end_id is not None else output.ids


def end_ids(engine: Engine) -> list[int]:
    """Tokens that end an output in a check."""
    return [engine.config.eos_id]
