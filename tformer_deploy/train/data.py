"""Parallel text to bucketed batches: from files, the Multi30K layout, or two generated tasks."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ConfigError, DataError, missing_extra, unknown
from ..base.lines import read_lines
from ..bundle.text import SentencePiece, Tokenizers
from ..translate.batches import Ids, pad
from .alignments import Links, piece_links, read_links

MOST_SAMPLING_SEED = 2**32 - 1
"""sentencepiece takes seeds below this."""


@dataclass(frozen=True)
class Parallel:
    """Lines and their translations, one to one."""

    src: list[str]
    tgt: list[str]
    links: list[Links] = field(default_factory=list)
    """The words of each pair that are translations of each other; empty: not known."""


@dataclass(frozen=True)
class DataConfig:
    """Where training text comes from: exactly one of files, multi30k, task."""

    src: str = ""
    tgt: str = ""
    valid_src: str = ""
    valid_tgt: str = ""
    multi30k: str = ""
    """Folder with train.en(.gz), val.en(.gz) and so on."""
    pair: str = "en-de"
    """Source and target language of Multi30K and of the word-level tokenizer."""
    task: str = ""
    """`copy` or `numbers`."""
    prepare: str = ""
    """`moses`: lower-cased, Moses-tokenised text, by `moses.Moses`; empty: the text as it is."""
    alignments: str = ""
    """Word alignments of `src` and `tgt`, see `alignments.read_links`."""


@dataclass(frozen=True)
class Sampling:
    """Which sides get other pieces in each epoch, see `TrainConfig`; 0: never."""

    src: float = 0.0
    tgt: float = 0.0
    nbest: int = -1


@dataclass(frozen=True)
class TrainingBatch:
    """Right-padded rows. src_ids (B, S), src_lengths (B), tgt_in and tgt_out (B, T); padded targets hold pad_id."""

    src_ids: Ids
    src_lengths: Ids
    tgt_in: Ids
    tgt_out: Ids


def read_parallel(src: Path, tgt: Path, alignments: str = "") -> Parallel:
    """Two files of equally many lines, and one of their alignments; pairs with an empty side are left out.

    Raises DataError.
    """
    pair = Parallel(read_lines(src), read_lines(tgt))
    if len(pair.src) != len(pair.tgt):
        raise DataError(f"{src} has {len(pair.src)} lines, {tgt} has {len(pair.tgt)}: they must be translations")
    links = read_links(Path(alignments), pair.src, pair.tgt) if alignments else []
    kept = [i for i, sides in enumerate(zip(pair.src, pair.tgt, strict=True)) if all(sides)]
    if not kept:
        raise DataError(f"{src}: no line with text on both sides")
    return Parallel([pair.src[i] for i in kept], [pair.tgt[i] for i in kept], [links[i] for i in kept if links])


def load_data(config: DataConfig) -> tuple[Parallel, Parallel]:
    """Training and validation text, prepared."""
    if config.prepare not in ("", "moses"):
        raise unknown("--prepare", config.prepare, ("moses",))
    if config.prepare and config.alignments:
        raise ConfigError("--alignments are of the text as it is: prepare it with tformer prepare, and drop --prepare")
    train, valid = _read_data(config)
    if not config.prepare:
        return train, valid
    from .moses import Moses

    src, tgt = map(Moses, split_pair(config.pair))
    prepared = [
        Parallel([src.prepared(line) for line in part.src], [tgt.prepared(line) for line in part.tgt])
        for part in (train, valid)
    ]
    return prepared[0], prepared[1]


def _read_data(config: DataConfig) -> tuple[Parallel, Parallel]:
    given = [name for name in ("src", "multi30k", "task") if getattr(config, name)]
    if len(given) != 1:
        raise ConfigError("name the training data by one of --src and --tgt, --multi30k, --task")
    for name in ("tgt", "valid_src", "valid_tgt", "alignments"):
        if getattr(config, name) and not config.src:
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --src: leave it out with --{given[0]}")
    if config.task:
        return make_task(config.task)
    if config.multi30k:
        src, tgt = split_pair(config.pair)
        folder = Path(config.multi30k)
        train, valid = (
            read_parallel(_plain_or_gz(folder / f"{part}.{src}"), _plain_or_gz(folder / f"{part}.{tgt}"))
            for part in ("train", "val")
        )
        return train, valid
    for name in ("tgt", "valid_src", "valid_tgt"):
        if not getattr(config, name):
            raise ConfigError(f"--src needs --{name.replace('_', '-')} as well")
    return (
        read_parallel(Path(config.src), Path(config.tgt), config.alignments),
        read_parallel(Path(config.valid_src), Path(config.valid_tgt)),
    )


def make_task(name: str) -> tuple[Parallel, Parallel]:
    """Generated text, the same on every machine; training and validation share no line."""
    tasks: dict[str, Callable[[random.Random], Parallel]] = {"copy": _copy, "numbers": _numbers}
    if name not in tasks:
        raise unknown("task", name, tasks)
    pairs = tasks[name](random.Random(20170612))
    held_out = 500
    return (
        Parallel(pairs.src[held_out:], pairs.tgt[held_out:]),
        Parallel(pairs.src[:held_out], pairs.tgt[:held_out]),
    )


def _copy(rng: random.Random) -> Parallel:
    """Sequences of the symbols 1 to 10, to be repeated. Source: The Annotated Transformer, first example."""
    made = dict.fromkeys(" ".join(str(rng.randint(1, 10)) for _ in range(rng.randint(4, 10))) for _ in range(12_000))
    lines = list(made)
    return Parallel(lines, lines)


def _numbers(rng: random.Random) -> Parallel:
    """English number words and their German translation, up to 999,999.

    The number of digits is drawn first, so that short numbers are frequent; a number that is drawn twice stands once.
    """
    try:
        from num2words import num2words
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None
    made = dict.fromkeys(rng.randrange(10 ** rng.randint(1, 6)) for _ in range(16_000))
    numbers = list(made)
    rng.shuffle(numbers)
    return Parallel(*([num2words(n, lang=language) for n in numbers] for language in ("en", "de")))


def split_pair(pair: str, option: str = "--pair") -> tuple[str, str]:
    """Source and target language of `en-de`. Raises ConfigError."""
    parts = pair.split("-")
    if len(parts) != 2 or not all(parts):
        raise ConfigError(f"{option} {pair}: write source and target language as in en-de")
    return parts[0], parts[1]


def _plain_or_gz(path: Path) -> Path:
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return candidate
    raise DataError(f"{path}(.gz): no such file; --multi30k takes the folder with train.en, val.en and so on")


class EncodedPairs:
    """Encoded pairs, cut into batches by padded tokens; each epoch has its own, reproducible order."""

    def __init__(self, text: Parallel, tokenizers: Tokenizers, max_tokens: int) -> None:
        self.text, self.src, self.tgt, self.left_out = Parallel([], []), [], [], 0
        self._tokenizers, self._max_tokens = tokenizers, max_tokens
        self._links: list[Ids] = []
        """Of each pair, target and source positions; empty: no alignments are known."""
        for number, (source, target) in enumerate(zip(text.src, text.tgt, strict=True)):
            s, t = tokenizers.source_ids(source), tokenizers.target_ids(target)
            if max(len(s), len(t)) > max_tokens:
                self.left_out += 1
                continue
            self.text.src.append(source)
            self.text.tgt.append(target)
            self.src.append(np.array(s, np.int32))
            self.tgt.append(np.array(t, np.int32))
            if text.links:
                self._links.append(piece_links(text.links[number], source, target, tokenizers))
        if not self.src:
            raise DataError(
                f"every pair is longer than {max_tokens} tokens: raise train.max_tokens and model.max_positions"
            )
        self._best = self.src, self.tgt
        self._measure()

    def _measure(self) -> None:
        self._src_sizes = np.array([len(ids) for ids in self.src])
        self._tgt_sizes = np.array([len(ids) for ids in self.tgt])

    def draw(self, sampling: Sampling, seed: int, epoch: int) -> None:
        """Give the lines the pieces of an epoch; a line that gets too many keeps its best ones."""
        if not sampling.src and not sampling.tgt:
            return
        sides = self._tokenizers.source, self._tokenizers.target
        ends = self._tokenizers.around, ((), (self._tokenizers.target.specials.eos,))
        lines, alphas, found = (self.text.src, self.text.tgt), (sampling.src, sampling.tgt), [*self._best]
        for side, alpha in enumerate(alphas):
            if alpha:
                tokenizer, (before, after) = sides[side], ends[side]
                assert isinstance(tokenizer, SentencePiece)
                own = np.random.SeedSequence([seed, epoch, side]).generate_state(1)[0] % MOST_SAMPLING_SEED
                drawn = tokenizer.sampled(lines[side], int(own), alpha, sampling.nbest)
                made = [np.array([*before, *ids, *after], np.int32) for ids in drawn]
                pairs = zip(made, self._best[side], strict=True)
                found[side] = [ids if len(ids) <= self._max_tokens else best for ids, best in pairs]
        self.src, self.tgt = found
        self._measure()

    def plan(self, batch_tokens: int, seed: int, epoch: int) -> list[NDArray[np.int64]]:
        """Indices of each batch: pairs of similar length together, batches in random order."""
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(len(self.src))
        order = order[np.lexsort((self._src_sizes[order], self._tgt_sizes[order]))]
        longest = np.maximum(self._src_sizes, self._tgt_sizes)[order]
        batches, start, width = [], 0, 0
        for end, size in enumerate(longest):
            width = max(width, int(size))
            if width * (end + 1 - start) > batch_tokens and end > start:
                batches.append(order[start:end])
                start, width = end, int(size)
        batches.append(order[start:])
        return [batches[i] for i in rng.permutation(len(batches))]

    def batch(self, indices: NDArray[np.int64], pad_id: int, start_id: int) -> TrainingBatch:
        """Pad some pairs to a batch."""
        tgt_out = pad([self.tgt[i] for i in indices], pad_id)
        tgt_in = np.concatenate((np.full((len(indices), 1), start_id, np.int32), tgt_out[:, :-1]), 1)
        return TrainingBatch(
            pad([self.src[i] for i in indices], pad_id), self._src_sizes[indices].astype(np.int32), tgt_in, tgt_out
        )

    def links(self, indices: NDArray[np.int64]) -> Ids | None:
        """Links (N, 3) of a batch: row, target position, source position; None: no alignments are known."""
        if not self._links:
            return None
        rows = [np.insert(self._links[i], 0, row, 1) for row, i in enumerate(indices)]
        return np.concatenate(rows)

    def target_tokens(self, indices: NDArray[np.int64]) -> int:
        """Target tokens of a batch."""
        return int(self._tgt_sizes[indices].sum())


@dataclass
class BatchStream:
    """Endless batches; `epoch` and `index` are the position to resume from."""

    corpus: EncodedPairs
    batch_tokens: int
    seed: int
    epoch: int = 0
    index: int = 0
    sampling: Sampling = Sampling()

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        while True:
            self.corpus.draw(self.sampling, self.seed, self.epoch)
            plan = self.corpus.plan(self.batch_tokens, self.seed, self.epoch)
            while self.index < len(plan):
                self.index += 1
                yield plan[self.index - 1]
            self.epoch, self.index = self.epoch + 1, 0


def fingerprint(text: tuple[Parallel, Parallel]) -> str:
    """Hex SHA-256 of training and validation text."""
    found = hashlib.sha256()
    for part in text:
        for side in (part.src, part.tgt, *([part.links] if part.links else [])):
            found.update(json.dumps(side).encode())
    return found.hexdigest()
