"""Vocabulary shortlists: the target tokens that a sentence's source tokens make likely, learned from parallel text."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle import MANIFEST, Bundle
from .contract import SHORT_GRAPHS
from .errors import ArtifactError, ConfigError, DataError
from .files import atomic_file, write_json
from .headers import DAMAGED, read_arrays
from .text import SPECIALS

Ids = NDArray[np.int32]
Keys = NDArray[np.int64]
Doubles = NDArray[np.float64]
Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Sentences: ids of the source and of its translation, without special tokens."""
ITERATIONS, CHUNK = 5, 10_000
"""Of expectation maximization; sentences that are looked at together."""
MOST = 1 << 28
"""Entries of the table of all lists, filled up: 1 GiB."""


@dataclass(frozen=True)
class Settings:
    """How long lists are."""

    best: int = 50
    """Target tokens for each source token."""
    frequent: int = 100
    """Tokens that are in every list because the text has them most often."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"--{name} {value}: must be at least 1")


@dataclass(frozen=True)
class Coverage:
    """What lists would have left of a text."""

    sentences: int
    tokens: float
    """Share of the target tokens, end tokens included, that are in their sentence's list."""
    size: float
    """Tokens of a sentence's list, mean."""

    def __str__(self) -> str:
        return f"{self.tokens:.2%} of the target tokens of {self.sentences} sentences, lists of {self.size:.0f} tokens"


class Shortlist:
    """Which target tokens a sentence may use. V target tokens."""

    def __init__(self, always: Ids, offsets: Keys, targets: Ids, vocab: int) -> None:
        self.always, self.vocab = always, vocab
        """Tokens of every list; size of the vocabulary."""
        self.offsets, self.targets = offsets, targets
        """Where each source token's own begin and end; those, token by token."""
        if any(part.ndim != 1 or part.dtype.kind != "i" for part in (always, offsets, targets)):
            raise ValueError("its lists are not lists of whole numbers")
        if len(targets) != offsets[-1]:
            raise ValueError(f"it has {len(targets)} tokens, not {offsets[-1]}")
        if not 0 <= min(always.min(), targets.min(initial=0)) <= max(always.max(), targets.max(initial=0)) < vocab:
            raise ValueError(f"a token is outside the vocabulary of {vocab}")
        counts = np.diff(offsets)
        if offsets[0] or counts.min(initial=0) < 0 or (len(counts) + 1) * int(counts.max(initial=1)) > MOST:
            raise ValueError("its lists overlap or are too long")
        places = np.arange(int(counts.max(initial=1)))
        # Filled up with what every list has, and a row of that for padding, so that one look-up does for a batch.
        self._table = np.full((len(counts) + 1, len(places)), always[0], np.int32)
        self._table[:-1][places < counts[:, None]] = targets

    def allowed(self, src_ids: Ids, src_lengths: Ids) -> NDArray[np.bool_]:
        """src_ids (B, S), padded, src_lengths (B) -> (B, V)."""
        found = np.zeros((len(src_ids), self.vocab), np.bool_)
        found[:, self.always] = True
        real = np.where(np.arange(src_ids.shape[1]) < src_lengths[:, None], src_ids, len(self._table) - 1)
        found[np.arange(len(src_ids))[:, None, None], self._table[real]] = True
        return found


def learn(pairs: Pairs, src_vocab: int, tgt_vocab: int, settings: Settings, shared: bool) -> Shortlist:
    """The lists of a text. `shared`: source tokens are target tokens too, and may be copied."""
    keys, chances = translation_table(pairs, src_vocab, tgt_vocab)
    source, target = np.divmod(keys, tgt_vocab)
    order = np.lexsort((target, -chances, source))
    source, target = source[order], target[order]
    ranks = np.arange(len(source)) - np.searchsorted(source, source)
    kept = (ranks < settings.best) & (source < src_vocab)
    chosen = keys[order][kept]
    if shared:
        own = np.arange(len(SPECIALS), min(src_vocab, tgt_vocab), dtype=np.int64)
        chosen = np.union1d(chosen, own * tgt_vocab + own)
    chosen = np.sort(chosen)
    offsets = np.searchsorted(chosen, np.arange(src_vocab + 1, dtype=np.int64) * tgt_vocab)
    counts = np.bincount(np.concatenate([np.asarray(tgt, np.int64) for _, tgt in pairs]), minlength=tgt_vocab)
    frequent = np.argsort(-counts, kind="stable")[: settings.frequent]
    always = np.union1d(np.arange(min(len(SPECIALS), tgt_vocab)), frequent[counts[frequent] > 0])
    return Shortlist(always.astype(np.int32), offsets, (chosen % tgt_vocab).astype(np.int32), tgt_vocab)


def translation_table(pairs: Pairs, src_vocab: int, tgt_vocab: int) -> tuple[Keys, Doubles]:
    """Pairs of tokens that meet, as source * tgt_vocab + target, and p(target | source); `src_vocab` is the empty word.

    IBM Model 1 by expectation maximization. Source: Brown et al. 1993, "The Mathematics of Statistical Machine
    Translation".
    """
    found = [np.unique(keys) for keys, _ in meetings(pairs, src_vocab, tgt_vocab)]
    if not found:
        raise DataError("no sentence pair has tokens on both sides: give parallel text")
    keys = np.unique(np.concatenate(found))
    sources = keys // tgt_vocab
    chances = np.ones(len(keys))
    for _ in range(ITERATIONS):
        counts = np.zeros(len(keys))
        for chunk, slots in meetings(pairs, src_vocab, tgt_vocab):
            places = np.searchsorted(keys, chunk)
            weights = chances[places]
            weights /= np.bincount(slots, weights)[slots]
            counts += np.bincount(places, weights, len(keys))
        chances = counts / np.bincount(sources, counts)[sources]
    return keys, chances


def meetings(pairs: Pairs, src_vocab: int, tgt_vocab: int) -> Iterator[tuple[Keys, Keys]]:
    """Of a chunk of sentences, every source token beside every target token, and the number of the latter's place."""
    for start in range(0, len(pairs), CHUNK):
        keys, slots, places = [], [], 0
        for source, target in pairs[start : start + CHUNK]:
            if not source or not target:
                continue
            words = np.array([*source, src_vocab], np.int64)
            keys.append((words * tgt_vocab + np.asarray(target, np.int64)[:, None]).ravel())
            slots.append(np.repeat(np.arange(places, places + len(target)), len(words)))
            places += len(target)
        if keys:
            yield np.concatenate(keys), np.concatenate(slots)


def coverage(shortlist: Shortlist, pairs: Pairs, end_id: int) -> Coverage:
    """How much of a text its lists have."""
    inside = tokens = size = 0
    for source, target in pairs:
        allowed = shortlist.allowed(np.array([source], np.int32), np.array([len(source)], np.int32))[0]
        inside += int(allowed[[*target, end_id]].sum())
        tokens += len(target) + 1
        size += int(allowed.sum())
    return Coverage(len(pairs), inside / tokens, size / len(pairs))


def add_shortlist(bundle: Bundle, source: Sequence[str], target: Sequence[str], settings: Settings) -> Coverage:
    """Learn lists from as many lines of both sides; store them in a bundle, which stays as it was if that fails.

    Raises ConfigError where the bundle has no graphs for them.
    """
    if not any(_has_graphs(bundle, name) for name in bundle.variants):
        raise ConfigError(f"{bundle.directory} has no graphs for shortlists: export it again, with --recipe int8")
    tokenizers, config = bundle.tokenizers(), bundle.config
    both = zip(source, target, strict=True)
    pairs = [(tokenizers.source.encode(a), tokenizers.target.encode(b)) for a, b in both]
    shortlist = learn(pairs, config.src_vocab, config.tgt_vocab, settings, tokenizers.source is tokenizers.target)
    found = coverage(shortlist, pairs, config.eos_id)
    store(bundle, shortlist, {**asdict(settings), **asdict(found)})
    return found


def store(bundle: Bundle, shortlist: Shortlist, description: dict[str, Any]) -> None:
    """Write lists to a file named after its content: until the manifest is replaced, the old one counts."""
    buffer = io.BytesIO()
    tokenizers = np.array(list(bundle.tokenizer_hashes.values()))
    np.savez(
        buffer,
        tokenizers=tokenizers,
        vocab=np.array(shortlist.vocab),
        always=shortlist.always,
        offsets=shortlist.offsets,
        targets=shortlist.targets,
    )
    manifest, directory = bundle.manifest, bundle.directory
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    path = directory / f"shortlist-{digest[:12]}.npz"
    old = manifest.get("shortlist", {}).get("file", "")
    with atomic_file(path) as temporary:
        temporary.write_bytes(buffer.getvalue())
    files = {**{name: sha for name, sha in manifest["files"].items() if name != old}, path.name: digest}
    kept = old
    try:
        write_json(directory / MANIFEST, {**manifest, "shortlist": {"file": path.name, **description}, "files": files})
        kept = path.name
    finally:  # also what a killed run has left
        for other in directory.glob(f"shortlist-{'[0-9a-f]' * 12}.npz"):
            if other.name != kept:
                other.unlink()


def open_shortlist(bundle: Bundle, variant: str) -> Shortlist:
    """The lists of a bundle, for one of its variants. Raises ConfigError where there is none, ArtifactError."""
    if "shortlist" not in bundle.manifest:
        raise ConfigError(
            f"{bundle.directory} has no shortlist: tformer shortlist {bundle.directory} --src FILE --tgt FILE"
        )
    if not _has_graphs(bundle, variant):
        raise ConfigError(f"variant {variant} of {bundle.directory} has no graphs for shortlists: export it again")
    path = bundle.directory / bundle.manifest["shortlist"]["file"]
    config = bundle.config
    try:
        arrays = read_arrays(path, ("always", "offsets", "targets", "tokenizers", "vocab"))
        always, offsets, targets = (arrays[name] for name in ("always", "offsets", "targets"))
        tokenizers, vocab = arrays["tokenizers"].tolist(), int(arrays["vocab"])
        shortlist = Shortlist(always, offsets, targets, vocab)
    except DAMAGED as error:
        raise ArtifactError(f"{path} is damaged ({error}): make it again with tformer shortlist") from None
    ours = list(bundle.tokenizer_hashes.values())
    if tokenizers != ours or vocab != config.tgt_vocab or len(offsets) != config.src_vocab + 1:
        raise ArtifactError(f"{path} is of another bundle's tokenizers: make it again with tformer shortlist")
    return shortlist


def _has_graphs(bundle: Bundle, variant: str) -> bool:
    return all(f"{variant}/{name}.onnx" in bundle.manifest["files"] for name in SHORT_GRAPHS)
