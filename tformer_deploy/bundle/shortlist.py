"""Vocabulary shortlists: the target tokens that a sentence's source tokens make likely, learned from parallel text."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ArtifactError, ConfigError, DataError
from ..base.files import atomic_file, write_json
from ..base.headers import DAMAGED
from .contract import SHORT_GRAPHS
from .manifest import MANIFEST, Bundle
from .text import OUR_SPECIALS, Specials

Ids = NDArray[np.int32]
Keys = NDArray[np.int64]
Doubles = NDArray[np.float64]
Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Sentences: ids of the source and of its translation, without special tokens."""
ITERATIONS, CHUNK = 5, 10_000
"""Rounds of expectation maximization; sentences per numpy call."""
MAX_ENTRIES = 1 << 28
"""Entries of the padded table of all lists, 4 bytes each: at most 1 GiB."""
MAGIC, LAYOUT = b"tformer shortlist 1\n", struct.Struct("<20sIIIQ32s32s24x")
"""Header of a file: magic, sizes of both vocabularies, number of tokens in every list, total length of the lists of
single source tokens, SHA-256 of both tokenizers' files. 128 bytes, little-endian."""


@dataclass(frozen=True)
class Settings:
    """How long lists are."""

    best: int = 50
    """Target tokens for each source token."""
    frequent: int = 100
    """The most frequent target tokens, which are in every list."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"--{name} {value}: must be at least 1")

    def check(self, src_vocab: int, tgt_vocab: int, shared: bool) -> None:
        """Raise ConfigError where lists may be too long; `shared`: each list also has its source token."""
        most = MAX_ENTRIES // (src_vocab + 1)
        if min(self.best + shared, tgt_vocab) > most:
            raise ConfigError(f"--best {self.best}: at most {most - shared} for {src_vocab} source entries")


@dataclass(frozen=True)
class Coverage:
    """How much of a text the lists cover."""

    sentences: int
    tokens: float
    """Share of the target tokens, end tokens included, that are in their sentence's list."""
    size: float
    """Tokens of a sentence's list, mean."""

    def __str__(self) -> str:
        if not self.sentences:
            return "no text was given to measure the coverage of"
        return f"{self.tokens:.2%} of the target tokens of {self.sentences} sentences, lists of {self.size:.0f} tokens"


class Shortlist:
    """The target tokens that a sentence may use; V: size of the target vocabulary."""

    def __init__(self, always: Ids, offsets: Keys, targets: Ids, vocab: int) -> None:
        self.always, self.vocab = always, vocab
        """Tokens in every list; V."""
        self.offsets, self.targets = offsets, targets
        """Where each source token's list begins in `targets`, and the last ends; the lists, one after the other."""
        if any(part.ndim != 1 or part.dtype.kind != "i" for part in (always, offsets, targets)):
            raise ValueError("its lists are not lists of whole numbers")
        if len(targets) != offsets[-1]:
            raise ValueError(f"it has {len(targets)} tokens, not {offsets[-1]}")
        if not 0 <= min(always.min(), targets.min(initial=0)) <= max(always.max(), targets.max(initial=0)) < vocab:
            raise ValueError(f"a token is outside the vocabulary of {vocab}")
        counts = np.diff(offsets)
        if offsets[0] or counts.min(initial=0) < 0 or (len(counts) + 1) * int(counts.max(initial=1)) > MAX_ENTRIES:
            raise ValueError("its lists overlap or are too long")
        places = np.arange(int(counts.max(initial=1)))
        # Padded with a token that every list has, and a row of it for padding, so that one look-up serves a batch.
        self._table = np.full((len(counts) + 1, len(places)), always[0], np.int32)
        self._table[:-1][places < counts[:, None]] = targets

    def allowed(self, src_ids: Ids, src_lengths: Ids) -> NDArray[np.bool_]:
        """src_ids (B, S), padded, src_lengths (B) -> (B, V)."""
        found = np.zeros((len(src_ids), self.vocab), np.bool_)
        found[:, self.always] = True
        real = np.where(np.arange(src_ids.shape[1]) < src_lengths[:, None], src_ids, len(self._table) - 1)
        found[np.arange(len(src_ids))[:, None, None], self._table[real]] = True
        return found


def learn(
    pairs: Pairs, src_vocab: int, tgt_vocab: int, settings: Settings, shared: bool, specials: Specials = OUR_SPECIALS
) -> Shortlist:
    """Learn lists from a text; all have the target's special tokens. `shared`: each list also has its source token."""
    keys, chances = translation_table(pairs, src_vocab, tgt_vocab)
    source, target = np.divmod(keys, tgt_vocab)
    order = np.lexsort((target, -chances, source))
    source, target = source[order], target[order]
    ranks = np.arange(len(source)) - np.searchsorted(source, source)
    kept = (ranks < settings.best) & (source < src_vocab)
    chosen = keys[order][kept]
    if shared:
        own = np.setdiff1d(np.arange(min(src_vocab, tgt_vocab), dtype=np.int64), specials.ids)
        chosen = np.union1d(chosen, own * tgt_vocab + own)
    chosen = np.sort(chosen)
    offsets = np.searchsorted(chosen, np.arange(src_vocab + 1, dtype=np.int64) * tgt_vocab)
    counts = np.bincount(np.concatenate([np.asarray(tgt, np.int64) for _, tgt in pairs]), minlength=tgt_vocab)
    frequent = np.argsort(-counts, kind="stable")[: settings.frequent]
    always = np.union1d(specials.ids, frequent[counts[frequent] > 0])
    return Shortlist(always.astype(np.int32), offsets, (chosen % tgt_vocab).astype(np.int32), tgt_vocab)


def translation_table(pairs: Pairs, src_vocab: int, tgt_vocab: int) -> tuple[Keys, Doubles]:
    """Co-occurring tokens, as source * tgt_vocab + target, and p(target | source); `src_vocab`: the empty word.

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
    """For each chunk of sentences, every pair of a source and a target token, and the index of the target position."""
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
    """How much of a text its lists cover."""
    inside = tokens = size = 0
    for source, target in pairs:
        allowed = shortlist.allowed(np.array([source], np.int32), np.array([len(source)], np.int32))[0]
        inside += int(allowed[[*target, end_id]].sum())
        tokens += len(target) + 1
        size += int(allowed.sum())
    return Coverage(len(pairs), inside / tokens, size / len(pairs))


def add_shortlist(bundle: Bundle, source: Sequence[str], target: Sequence[str], settings: Settings) -> Coverage:
    """Learn lists from parallel lines and store them in a bundle, which is unchanged if that fails.

    Raises ConfigError where the bundle has no graphs for shortlists, or lists could be too long, and DataError for text
    whose tokens are all unknown.
    """
    require_graphs(bundle)
    tokenizers, config = bundle.tokenizers(), bundle.config
    shared, specials = tokenizers.source is tokenizers.target, tokenizers.target.specials
    settings.check(config.src_vocab, config.tgt_vocab, shared)
    both = zip(source, target, strict=True)
    pairs = [(tokenizers.source.encode(a), tokenizers.target.encode(b)) for a, b in both]
    if {token for _, tokens in pairs for token in tokens} == {specials.unk}:
        raise DataError("the target vocabulary has no token of this text: give text in the languages of the bundle")
    shortlist = learn(pairs, config.src_vocab, config.tgt_vocab, settings, shared, specials)
    found = coverage(shortlist, pairs, config.eos_id)
    store(bundle, shortlist, {**asdict(settings), **asdict(found)})
    return found


def require_graphs(bundle: Bundle) -> None:
    """Raise ConfigError where no variant can score a list alone."""
    bundle.require_decoder()
    if not any(_has_graphs(bundle, name) for name in bundle.variants):
        raise ConfigError(
            f"{bundle.directory} has no graphs for shortlists: export it again, with --recipe int8; a model "
            "whose output is more than a product has none"
        )


def store(bundle: Bundle, shortlist: Shortlist, description: dict[str, Any]) -> None:
    """Write lists to a file named after its hash; the old file is in use until the manifest is replaced."""
    content = packed(shortlist, side_hashes(bundle))
    manifest, directory = bundle.manifest, bundle.directory
    digest = hashlib.sha256(content).hexdigest()
    path = directory / f"shortlist-{digest[:12]}.bin"
    old = manifest.get("shortlist", {}).get("file", "")
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)
    files = {**{name: sha for name, sha in manifest["files"].items() if name != old}, path.name: digest}
    kept = old
    try:
        write_json(directory / MANIFEST, {**manifest, "shortlist": {"file": path.name, **description}, "files": files})
        kept = path.name
    finally:  # also leftovers of a killed run
        for other in directory.glob(f"shortlist-{'[0-9a-f]' * 12}.bin"):
            if other.name != kept:
                other.unlink()


def side_hashes(bundle: Bundle) -> tuple[bytes, bytes]:
    """SHA-256 of the source's and of the target's tokenizer file."""
    hashes, sides = bundle.tokenizer_hashes, bundle.manifest["tokenizer"]
    source, target = (bytes.fromhex(hashes[sides[side]["file"]]) for side in ("source", "target"))
    return source, target


def packed(shortlist: Shortlist, tokenizers: tuple[bytes, bytes]) -> bytes:
    """The file's content: `LAYOUT`, then offsets (int64), always and targets (int32)."""
    sizes = len(shortlist.offsets) - 1, shortlist.vocab, len(shortlist.always), len(shortlist.targets)
    arrays = shortlist.offsets.astype("<i8"), shortlist.always.astype("<i4"), shortlist.targets.astype("<i4")
    return LAYOUT.pack(MAGIC, *sizes, *tokenizers) + b"".join(array.tobytes() for array in arrays)


def unpacked(path: Path) -> tuple[Shortlist, tuple[bytes, bytes]]:
    """The lists of a file, and the hashes of their tokenizers. Raises one of `DAMAGED`."""
    content = np.fromfile(path, np.uint8)
    magic, sources, vocab, every, own, *tokenizers = LAYOUT.unpack(content[: LAYOUT.size].tobytes())
    if magic != MAGIC:
        raise ValueError("it is no file of lists of version 1")
    sizes = (sources + 1, "<i8"), (every, "<i4"), (own, "<i4")
    expected = LAYOUT.size + sum(count * np.dtype(kind).itemsize for count, kind in sizes)
    if len(content) != expected:
        raise ValueError(f"it has {len(content)} bytes, not {expected}")
    arrays, place = [], LAYOUT.size
    for count, kind in sizes:
        arrays.append(np.frombuffer(content, kind, count, place))
        place += arrays[-1].nbytes
    offsets, always, targets = arrays
    return Shortlist(always, offsets, targets, vocab), (tokenizers[0], tokenizers[1])


def open_shortlist(bundle: Bundle, variant: str) -> Shortlist:
    """The lists of a bundle, for one of its variants. Raises ConfigError where there is none, ArtifactError."""
    bundle.require_decoder()
    if "shortlist" not in bundle.manifest:
        raise ConfigError(
            f"{bundle.directory} has no shortlist: tformer shortlist {bundle.directory} --src FILE --tgt FILE"
        )
    if not _has_graphs(bundle, variant):
        raise ConfigError(
            f"variant {variant} of {bundle.directory} has no graphs for shortlists: leave the shortlist out"
        )
    path, ours = bundle.directory / bundle.shortlist_file, side_hashes(bundle)
    try:
        shortlist, theirs = unpacked(path)
    except DAMAGED as error:
        raise ArtifactError(f"{path} is damaged ({error}): make it again with tformer shortlist") from None
    sizes = len(shortlist.offsets) - 1, shortlist.vocab
    if theirs != ours or sizes != (bundle.config.src_vocab, bundle.config.tgt_vocab):
        raise ArtifactError(f"{path} is of another bundle's tokenizers: make it again with tformer shortlist")
    return shortlist


def _has_graphs(bundle: Bundle, variant: str) -> bool:
    """Whether a variant can score a list alone. Programs need no further graphs for it."""
    recipe = bundle.variants.get(variant)
    return (recipe is not None and recipe.target == "native") or all(bundle.lists(n, variant) for n in SHORT_GRAPHS)
