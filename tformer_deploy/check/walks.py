"""Row consistency: under teacher forcing, each row of a beam must score as the same sentence alone.

Beams have any width, rows any order, and sentences of a batch are at different positions.
Nothing is decided on the way, so there are no ties, and lossy variants are held to it too. The scores of a row alone
are compared with eager's elsewhere, under teacher forcing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..decoding.rules import best_tokens
from ..engines.base import Engine, Floats, Ints, Outlook, Scores
from ..translate.batches import make_batch
from .compare import worse
from .observe import CheckOptions, spread
from .results import FULL, JOINED, LATE, MANY, WIDTHS, Walk

PATHS = 4
"""Different targets of a sentence; each of its rows follows one of them."""
SENTENCES, WIDE_SENTENCES, NARROW = 4, 2, 8
"""Sentences of a walk, and of one with more than `NARROW` beams."""
LATE_SENTENCES = 3
"""Sentences of a walk to the last position, the slowest of all."""
WIDTH_STEPS, MANY_STEPS, JOIN_STEPS = 5, 3, 2
"""Steps of the walks of every width and of many rows, enough to reorder rows twice; steps before others join."""
SHORT = 2
"""Source tokens of the walk of many rows: a word and eos, so that most sentences fit into a batch."""
ALWAYS = (2, 3, 4)
"""Widths that are compared however little time there is."""
FULL_SENTENCES, FULL_STEPS, FULL_WIDTHS = 96, 24, (2, 3, 4, 8)
"""Size of full batches: large, wide and as long as most outputs, for faults that need all three."""
FULL_ROWS, FULL_SHORT = 512, 8
"""Rows of a full batch of random width; source tokens of one with as many sentences as a translator takes."""
WIDTHS_SHARE, FULL_SHARE, LATE_SHARE = 0.1, 0.25, 0.25
"""Shares of `seconds` for each kind of walk."""
SCORED = 1 << 21
"""Most log-probabilities that a step returns (8 MiB); with more, only its best tokens are compared."""
Places = NDArray[np.int64]


@dataclass(frozen=True)
class ForcedBatch:
    """Sentences, and the tokens that each is forced to."""

    sources: list[list[int]]
    targets: Ints
    """(B, P, T): the token that is fed after each step."""
    copies: int = 1
    """How often each sentence is in a batch."""
    half_end: bool = False
    """Half of the sentences end half-way."""
    join_after: int = 0
    """Half of the sentences join the others after so many steps; 0: all begin together."""


@dataclass(frozen=True)
class Rows:
    """The state of an engine's rows, sentence by sentence."""

    which: Places
    """(B) The sentence of `ForcedBatch`."""
    ages: Places
    """(B) Steps so far."""
    paths: Places
    """(B, K) The target that each row follows."""

    def of(self, stay: Ints) -> Rows:
        """The rows of the sentences that stay."""
        return Rows(self.which[stay], self.ages[stay], self.paths[stay])

    def joined(self, others: Places) -> Rows:
        """These rows, followed by sentences at their first step."""
        ages, paths = np.zeros(len(others), np.int64), np.zeros((len(others), self.paths.shape[1]), np.int64)
        pairs = (self.which, others), (self.ages, ages), (self.paths, paths)
        return Rows(*(np.concatenate(pair) for pair in pairs))


def run_walks(engine: Engine, sources: Sequence[Sequence[int]], options: CheckOptions, limit: float) -> list[Walk]:
    """Walks of every width, in the largest batches, and to the last position, as far as time allows.

    `limit`: largest difference of a row's scores from those of the same row alone.
    """
    if not sources or not options.walks:
        return []
    few = [list(sources[i]) for i in spread(sources, SENTENCES)]
    return [
        *_widths(engine, few, options, limit),
        *_many_rows(engine, options, limit),
        *_full_batches(engine, [list(source) for source in sources], options, limit),
        *_late_rows(engine, few, options, limit),
        *(_joined_rows(engine, few, options, limit) if engine.admits else ()),
    ]


def _widths(engine: Engine, sources: list[list[int]], options: CheckOptions, limit: float) -> Iterator[Walk]:
    """Every width, the bundle's own and the usual ones first, the others in random order."""
    most = min(options.walks, engine.limits.beams)
    forced = random_targets(engine, sources, min(WIDTH_STEPS, engine.limits.tgt_tokens), options.seed)
    if not _fits(engine, forced, 1):
        return
    alone = [scores.copy() for scores in scores_alone(engine, forced)]
    others = np.random.default_rng(options.seed).permutation(np.arange(2, most + 1)).tolist()
    widths = list(dict.fromkeys([options.own_beams, *ALWAYS, *others]))
    until = time.perf_counter() + WIDTHS_SHARE * options.seconds
    for n, width in enumerate(width for width in widths if 1 < width <= most):
        if n > len(ALWAYS) and time.perf_counter() > until:
            break
        count = SENTENCES if width <= NARROW else WIDE_SENTENCES
        part = ForcedBatch(forced.sources[:count], forced.targets[:count])
        if _fits(engine, part, width):
            yield walk(engine, part, [scores[:count] for scores in alone], Walk(WIDTHS, width, limit=limit))


def late_scores(
    engine: Engine, exact: Engine, sources: Sequence[Sequence[int]], options: CheckOptions
) -> Iterator[tuple[Floats, Floats]]:
    """Scores of late rows alone by two engines, step by step, as far as time allows."""
    until = time.perf_counter() + LATE_SHARE * options.seconds
    forced = _late_targets(engine, [list(sources[i]) for i in spread(sources, SENTENCES)], options)
    for pair in zip(scores_alone(engine, forced), scores_alone(exact, forced), strict=True):
        yield pair
        if time.perf_counter() > until:
            break


def _late_targets(engine: Engine, sources: list[list[int]], options: CheckOptions) -> ForcedBatch:
    few = sources[-LATE_SENTENCES:]
    return random_targets(engine, few, engine.limits.tgt_tokens, options.seed, half_end=True)


def _late_rows(engine: Engine, sources: list[list[int]], options: CheckOptions, limit: float) -> Iterator[Walk]:
    """A beam up to the last position; half of the sentences end half-way."""
    width, until = max(options.beams, options.own_beams), time.perf_counter() + LATE_SHARE * options.seconds
    forced = _late_targets(engine, sources, options)
    if _fits(engine, forced, width):
        late = Walk(LATE, width, limit=limit)
        yield walk(engine, forced, scores_alone(engine, forced), late, lambda: time.perf_counter() > until)


def _joined_rows(engine: Engine, sources: list[list[int]], options: CheckOptions, limit: float) -> Iterator[Walk]:
    """A few widths in which sentences join others later; one of them up to the last position."""
    until = time.perf_counter() + LATE_SHARE * options.seconds
    longest, most = max(options.beams, options.own_beams), min(options.walks, engine.limits.beams)
    for width in dict.fromkeys([longest, options.own_beams, *ALWAYS]):
        steps = engine.limits.tgt_tokens if width == longest else min(WIDTH_STEPS, engine.limits.tgt_tokens)
        forced = random_targets(engine, sources, steps, options.seed)
        forced = ForcedBatch(forced.sources, forced.targets, join_after=JOIN_STEPS)
        if len(sources) > 1 and steps > JOIN_STEPS and 1 < width <= most and _fits(engine, forced, width):
            joined = Walk(JOINED, width, limit=limit)
            yield walk(engine, forced, scores_alone(engine, forced), joined, lambda: time.perf_counter() > until)


def _many_rows(engine: Engine, options: CheckOptions, limit: float) -> Iterator[Walk]:
    """As many short sentences as a translator's batch has, with one row each and with two."""
    config, count = engine.config, options.large_tokens // SHORT
    words = _words(config.src_vocab, {config.pad_id, config.bos_id, config.eos_id})
    rng = np.random.default_rng(options.seed)
    end = [config.eos_id] if 0 <= config.eos_id < config.src_vocab else []
    sources = [[int(word), *end][-engine.limits.src_tokens :] for word in rng.choice(words, SENTENCES)]
    forced = random_targets(engine, sources, min(MANY_STEPS, engine.limits.tgt_tokens), options.seed)
    if not _fits(engine, forced, 1):
        return
    alone = [scores.copy() for scores in scores_alone(engine, forced)]
    for width in (1, 2) if count else ():
        copies = min(count, engine.limits.sentences(width, SHORT, len(alone))) // SENTENCES
        many = ForcedBatch(forced.sources, forced.targets, copies)
        if copies > 1 and width <= max(1, options.beams) and _fits(engine, many, width):
            yield walk(engine, many, alone, Walk(MANY, width, limit=limit))


def _full_batches(engine: Engine, sources: list[list[int]], options: CheckOptions, limit: float) -> Iterator[Walk]:
    """Many sentences for many steps; half of the sentences end half-way.

    First the usual widths, then as many short sentences as a translator's batch has, then random other widths.
    """
    if not options.large_tokens:
        return
    until = time.perf_counter() + FULL_SHARE * options.seconds
    few = [sources[i] for i in spread(sources, SENTENCES)]
    short = sorted(sources, key=lambda source: abs(len(source) - FULL_SHORT))[:SENTENCES]
    usual = list(dict.fromkeys([1, options.own_beams, *FULL_WIDTHS]))
    others = np.random.default_rng(options.seed).permutation(np.arange(2, options.walks + 1)).tolist()
    as_many = options.large_tokens // max(map(len, short))
    for group, wanted in (
        (few, [(width, FULL_SENTENCES) for width in usual]),
        (short, [(width, as_many) for width in usual[:3]]),
        (few, [(width, FULL_ROWS // width) for width in others if width not in usual]),
    ):
        forced = random_targets(engine, group, min(FULL_STEPS, engine.limits.tgt_tokens), options.seed, half_end=True)
        if not _fits(engine, forced, 1):
            continue
        alone = [scores.copy() for scores in scores_alone(engine, forced)]
        longest, steps = max(map(len, group)), forced.targets.shape[2]
        for width, count in wanted:
            copies = min(count, engine.limits.sentences(width, longest, steps)) // len(group)
            full = ForcedBatch(forced.sources, forced.targets, copies, half_end=True)
            allowed = width <= min(options.walks, engine.limits.beams) and time.perf_counter() <= until
            if copies > 1 and allowed and _fits(engine, full, width):
                yield walk(engine, full, alone, Walk(FULL, width, limit=limit))


def random_targets(
    engine: Engine, sources: list[list[int]], steps: int, seed: int, half_end: bool = False
) -> ForcedBatch:
    """Random targets for each sentence: the same at first, then they diverge one by one."""
    config = engine.config
    words = _words(config.tgt_vocab, {config.pad_id, config.bos_id, config.eos_id, config.start_id})
    targets = np.random.default_rng(seed).choice(words, (len(sources), PATHS, steps)).astype(np.int32)
    for path, parted in enumerate(_parted(steps)):
        targets[:, path, :parted] = targets[:, 0, :parted]
    return ForcedBatch(sources, targets, half_end=half_end)


def _parted(steps: int) -> list[int]:
    """How many tokens each path shares with the first."""
    return [steps * (PATHS - 1 - path) // (PATHS - 1) for path in range(PATHS)]


def _words(vocab: int, special: set[int]) -> Places:
    words = np.setdiff1d(np.arange(vocab), [*special])
    return words if len(words) else np.arange(vocab)


def _fits(engine: Engine, forced: ForcedBatch, width: int) -> bool:
    """Whether an engine takes so many rows of these sentences, and every path as a sentence of its own."""
    longest, steps = max(map(len, forced.sources)), forced.targets.shape[2]
    limits, count = engine.limits, len(forced.sources) * forced.copies
    profiles = limits.profiles
    there = any(p.beams >= width and p.src_len >= longest and p.capacity >= steps for p in profiles) or not profiles
    return (
        there
        and width <= limits.beams
        and limits.sentences(width, longest, steps) >= count
        and limits.sentences(1, longest, steps) >= len(forced.sources) * PATHS
    )


def scores_alone(engine: Engine, forced: ForcedBatch) -> Iterator[Floats]:
    """Log-probabilities (B, P, V) of each step, every path as a sentence of its own with one row."""
    count, paths, steps = forced.targets.shape
    batch = make_batch([source for source in forced.sources for _ in range(paths)], engine.config.pad_id)
    state = engine.encode(batch.src_ids, batch.src_lengths, Outlook(1, steps, drawn=True))
    tokens = np.full((count * paths, 1), engine.config.start_id, np.int32)
    for step in range(steps):
        found = engine.step(tokens, state, full=True)
        assert found.log_probs is not None
        yield found.log_probs.reshape(count, paths, -1)
        tokens = np.ascontiguousarray(forced.targets[:, :, step].reshape(-1, 1))


def walk(
    engine: Engine,
    forced: ForcedBatch,
    alone: Iterator[Floats] | Sequence[Floats],
    result: Walk,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Walk:
    """Feed rows their targets: at each step, a row continues any row that has followed the same target so far.

    `alone`: from `scores_alone`. `out_of_time`: whether to stop.
    """
    config, width, rng = engine.config, result.width, np.random.default_rng(result.width)
    order = rng.permutation(np.repeat(np.arange(len(forced.sources)), forced.copies))
    which, others = np.split(order, [len(order) // 2 if forced.join_after else len(order)])
    batch, steps = make_batch([forced.sources[i] for i in which], config.pad_id), forced.targets.shape[2]
    outlook, recent = Outlook(width, steps, drawn=True), deque[Floats](maxlen=forced.join_after + 1)
    state = engine.encode(batch.src_ids, batch.src_lengths, outlook)
    rows = Rows(which, np.zeros(len(which), np.int64), np.zeros((len(which), 1), np.int64))
    for step, expected in enumerate(alone):
        recent.append(expected)
        if forced.join_after and step == forced.join_after:
            batch = make_batch([forced.sources[i] for i in others], config.pad_id)
            engine.admit(state, batch.src_ids, batch.src_lengths, outlook)
            rows = rows.joined(others)
        tokens = forced.targets[rows.which[:, None], rows.paths, rows.ages[:, None] - 1]
        tokens[rows.ages == 0] = config.start_id
        full = tokens.size * config.tgt_vocab <= SCORED and step % 2 == 0
        scores = engine.step(tokens, state, full=full)
        for age in np.unique(rows.ages):
            _compare(result, scores, recent[age - step - 1], rows, int(age))
        result.steps = step + 1
        if result.steps == steps or out_of_time():
            break
        stay = np.arange(len(tokens), dtype=np.int32)
        if forced.half_end and step == steps // 2:
            stay = np.sort(rng.permutation(stay)[: -(-len(stay) // 2)])
        rows, parents = _go_on(rng, rows.of(stay), width, steps)
        if width > 1 or len(stay) < len(tokens):
            parents = (parents + stay[:, None] * tokens.shape[1]).astype(np.int32)
            engine.reorder(state, parents, stay if len(stay) < len(tokens) else None)
    return result


def _go_on(rng: np.random.Generator, rows: Rows, width: int, steps: int) -> tuple[Rows, Places]:
    """The next rows, and their parents (B, K). Rows of one path are equal; if paths diverge here, both continue.

    Of paths that are equal so far, the first stands for all. If there are more paths than rows, some end.
    """
    parted = np.array(_parted(steps))
    twins = np.where(np.arange(steps + 1)[:, None] <= parted, 0, np.arange(PATHS))
    now, then = twins[rows.ages], twins[rows.ages + 1]  # (B, PATHS)
    there = (then == np.arange(PATHS)) & (now[:, :, None] == rows.paths[:, None, :]).any(2)
    order = np.where(there, rng.random(there.shape), 1.0).argsort(1)  # those that are there come first
    after = np.take_along_axis(order, np.arange(width) % there.sum(1, keepdims=True), 1)
    after = rng.permuted(after, axis=1)  # (B, K)
    same = np.take_along_axis(now, after, 1)[:, :, None] == rows.paths[:, None, :]
    parents = np.where(same, rng.random(same.shape), -1.0).argmax(2)
    return Rows(rows.which, rows.ages + 1, after), parents


def _compare(result: Walk, scores: Scores, alone: Floats, rows: Rows, age: int) -> None:
    """Compare the rows of all sentences of one age: best tokens, and all log-probabilities if they were returned."""
    vocab, best, here = alone.shape[-1], scores.ids.shape[-1], np.flatnonzero(rows.ages == age)
    ids, values, sentences, paths = scores.ids[here], scores.scores[here], rows.which[here][:, None], rows.paths[here]
    top = np.take_along_axis(alone, best_tokens(alone, min(best, vocab)), -1)
    known = ids.clip(0, vocab - 1)
    own = np.where(known == ids, alone[sentences[:, :, None], paths[:, :, None], known], np.nan)
    own = np.where(values == -np.inf, -np.inf, own)  # where fewer tokens are allowed than are returned, any may be
    off = np.maximum(_largest(values, top[sentences, paths]), _largest(values, own))
    if scores.log_probs is not None:
        off = np.maximum(off, _largest(scores.log_probs[here], alone[sentences, paths]))
    result.rows += off.size
    result.largest = worse(result.largest, float(off.max()))
    wrong = ~(off.astype(np.float64) <= result.limit)
    if wrong.any() and not result.wrong:
        n, row = (int(place) for place in np.argwhere(wrong)[0])
        of = f" of {off.shape[1]}" if off.shape[1] > 1 else ""
        result.first = f"token {age + 1}, row {row + 1}{of} of sentence {here[n] + 1} of {len(rows.which)}"
    result.wrong += int(wrong.sum())


def _largest(ours: Floats, theirs: Floats) -> Floats:
    """The largest difference of each row (B, K); minus infinity on both sides is equal."""
    with np.errstate(invalid="ignore"):
        apart: Floats = np.where(ours == theirs, 0, np.abs(ours - theirs)).max(-1)
    return apart
