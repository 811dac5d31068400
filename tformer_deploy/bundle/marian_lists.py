"""Lexical shortlists of Marian and Bergamot, the binary files `lex.*.s2t.bin`, as a bundle's lists.

Source: marian-dev, src/data/shortlist.cpp, `BinaryShortlistGenerator`; the checksum: src/common/hash.h.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ..base.errors import ArtifactError
from ..base.headers import DAMAGED, content
from .manifest import Bundle
from .shortlist import Coverage, Ids, Keys, Pairs, Settings, Shortlist, coverage, require_graphs, store

MAGIC, HEADER = 0xF11A48D5013417F5, struct.Struct("<6Q")
"""A header: magic, checksum of what follows it, how many of the first ids are in every list, how many a source token
has at most, number of offsets, number of ids. Then the offsets (u64) and the ids (u32)."""
MOST_BYTES = 1 << 30
WORD = (1 << 64) - 1


def add_marian_lists(bundle: Bundle, path: Path, source: Sequence[str] = (), target: Sequence[str] = ()) -> Coverage:
    """Store the lists of a file in a bundle; of parallel lines, if any, say how much they cover.

    Raises ConfigError where the bundle has no graphs for shortlists, ArtifactError for a file that is damaged or of
    another vocabulary.
    """
    require_graphs(bundle)
    tokenizers = bundle.tokenizers()
    shared = tokenizers.source is tokenizers.target
    shortlist, settings = read_lists(path, bundle.config.src_vocab, bundle.config.tgt_vocab, shared)
    both = zip(source, target, strict=True)
    pairs: Pairs = [(tokenizers.source.encode(a), tokenizers.target.encode(b)) for a, b in both]
    found = coverage(shortlist, pairs, bundle.config.eos_id) if pairs else Coverage(0, 0.0, 0.0)
    store(bundle, shortlist, {**asdict(settings), **asdict(found)})
    return found


def read_lists(path: Path, src_vocab: int, tgt_vocab: int, shared: bool) -> tuple[Shortlist, Settings]:
    """The lists of a file; `shared`: each also has its source token, as Marian adds it for a joint vocabulary.

    Raises ArtifactError.
    """
    file = content(path, MOST_BYTES)
    try:
        magic, checksum, first, best, words, count = HEADER.unpack_from(file)
        if magic != MAGIC:
            raise ArtifactError(f"{path} is no shortlist of Marian: give lex.*.bin, not the text that it is made of")
        if len(file) != HEADER.size + 8 * words + 4 * count or not words:
            raise ValueError(f"it has {len(file)} bytes, not {HEADER.size + 8 * words + 4 * count}")
        if checksum_of(file[16:]) != checksum:
            raise ValueError("it does not match its checksum")
        offsets = np.frombuffer(file, "<u8", words, HEADER.size).astype(np.int64)
        targets = np.frombuffer(file, "<u4", count, HEADER.size + 8 * words).astype(np.int32)
        if words - 1 > src_vocab or first > tgt_vocab or targets.max(initial=0) >= tgt_vocab:
            raise ArtifactError(f"{path} has lists of {words - 1} words: it is of another vocabulary")
        # The model may have entries more than its vocabulary, which no source has.
        offsets = np.pad(offsets, (0, src_vocab + 1 - words), mode="edge")
        if shared:
            offsets, targets = with_own(offsets, targets, min(src_vocab, tgt_vocab))
        return Shortlist(np.arange(first, dtype=np.int32), offsets, targets, tgt_vocab), Settings(best, first)
    except ArtifactError:
        raise
    except DAMAGED as error:
        raise ArtifactError(f"{path} is damaged ({error}): copy it again") from None


def with_own(offsets: Keys, targets: Ids, known: int) -> tuple[Keys, Ids]:
    """The lists, each with its own source token, for the first `known` tokens."""
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    own = np.arange(known, dtype=np.int64)
    pairs = np.unique(np.concatenate((np.stack((owners, targets)), np.stack((own, own))), 1), axis=1)
    return np.searchsorted(pairs[0], np.arange(len(offsets))), pairs[1].astype(np.int32)


def checksum_of(body: bytes) -> int:
    """Marian's hash of whole 64-bit numbers; what is left behind them is not in it."""
    seed = 0
    for value in np.frombuffer(body, "<u8", len(body) // 8).tolist():
        seed ^= (value + 0x9E3779B9 + ((seed << 6) & WORD) + (seed >> 2)) & WORD
    return seed
