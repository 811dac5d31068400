"""What can be read from tokenizer.json alone: entries, merge rules, and the sentencepiece model that it was made from.

transformers 5 writes nothing else. The model that is made anew splits text as the old one did.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL = 1, 2, 3
"""Types of models and of pieces in sentencepiece's format."""
SPACES = (" {2,}", "\\n")
"""What a normalizer may replace: sentencepiece makes one space of several, and a line has no end of line."""

NONE = {"type": "none"}
"""The step where a tokenizer.json has none."""


def entries_of(tokenizer: Mapping[str, Any], where: Path) -> list[str]:
    """The vocabulary in the order of its ids. Raises ArtifactError."""
    vocab = tokenizer.get("model", {}).get("vocab")
    if isinstance(vocab, list):
        return [str(piece) for piece, _ in vocab]
    if not isinstance(vocab, Mapping) or sorted(vocab.values()) != list(range(len(vocab))):
        raise ArtifactError(f"{where} has no vocabulary with ids 0, 1, 2 and so on: copy it again")
    return sorted(vocab, key=lambda piece: vocab[piece])


def merges_of(tokenizer: Mapping[str, Any]) -> list[str]:
    """Merge rules such as `a b`."""
    rules = tokenizer.get("model", {}).get("merges") or []
    return [rule if isinstance(rule, str) else " ".join(rule) for rule in rules]


def sentencepiece_model(tokenizer: Mapping[str, Any], where: Path) -> bytes:
    """A sentencepiece model with the pieces, scores and normalization of a tokenizer.json. Raises ArtifactError."""
    from sentencepiece import sentencepiece_model_pb2

    made = sentencepiece_model_pb2.ModelProto()
    model, entries = tokenizer.get("model", {}), entries_of(tokenizer, where)
    kind = model.get("type")
    if kind not in ("Unigram", "BPE") or model.get("byte_fallback"):
        raise ArtifactError(f"{where} has a {kind} model, not one of sentencepiece: add the folder's .model file")
    made.trainer_spec.model_type = UNIGRAM if kind == "Unigram" else BPE
    scores = dict(model["vocab"]) if kind == "Unigram" else _ranks(merges_of(tokenizer))
    unknown = model.get("unk_token") or entries[int(model.get("unk_id") or 0)]
    special = {each["content"] for each in tokenizer.get("added_tokens", []) if each.get("special", True)}
    for entry in entries:
        piece = made.pieces.add()
        piece.piece, piece.score = entry, scores.get(entry, 0.0)
        piece.type = UNKNOWN if entry == unknown else CONTROL if entry in special else NORMAL
    made.normalizer_spec.add_dummy_prefix = made.normalizer_spec.remove_extra_whitespaces = True
    for step in steps(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] == "Precompiled":
            made.normalizer_spec.precompiled_charsmap = base64.b64decode(step["precompiled_charsmap"])
        elif step["type"] != "Strip" and not _replaces_spaces(step):
            raise _refused(where, "normalizer", step)
    *others, last = list(steps(tokenizer.get("pre_tokenizer"), "pretokenizers")) or [NONE]
    for step in (*others, last):
        if not (_begins_with_a_space(step) if step is last else step["type"] == "WhitespaceSplit"):
            raise _refused(where, "pre-tokenizer", step)
    return bytes(made.SerializeToString())


def byte_level_space(tokenizer: Mapping[str, Any], where: Path) -> bool:
    """Whether a tokenizer.json of byte-level BPE puts a space before a text. Raises ArtifactError for other kinds."""
    for step in steps(tokenizer.get("normalizer"), "normalizers"):
        raise _refused(where, "normalizer", step)
    before = list(steps(tokenizer.get("pre_tokenizer"), "pretokenizers")) or [NONE]
    for step in before:
        if step["type"] != "ByteLevel" or not step.get("use_regex", True):
            raise _refused(where, "pre-tokenizer", step)
    return any(step.get("add_prefix_space") for step in before)


def around_text(tokenizer: Mapping[str, Any], where: Path) -> dict[str, tuple[int, ...]]:
    """`prefix` and `suffix` of a source, by the post-processor. Raises ArtifactError for other kinds."""
    found: dict[str, tuple[int, ...]] = {"prefix": (), "suffix": ()}
    for step in steps(tokenizer.get("post_processor"), "processors"):
        if step["type"] == "RobertaProcessing":
            found = {"prefix": (step["cls"][1],), "suffix": (step["sep"][1],)}
        elif step["type"] == "TemplateProcessing":
            ids = {name: tuple(token["ids"]) for name, token in step["special_tokens"].items()}
            parts = [ids.get(each.get("SpecialToken", {}).get("id"), ()) for each in step["single"]]
            at = next(i for i, each in enumerate(step["single"]) if "Sequence" in each)
            found = {"prefix": sum(parts[:at], ()), "suffix": sum(parts[at:], ())}
        elif step["type"] != "ByteLevel":
            raise _refused(where, "post-processor", step)
    return found


def _ranks(merges: list[str]) -> dict[str, float]:
    """The score of each merged piece: sentencepiece merges the pair of highest score first."""
    return {rule.replace(" ", ""): -float(rank) for rank, rule in reversed(list(enumerate(merges)))}


def steps(step: Any, parts: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, which may be sequences."""
    if isinstance(step, Mapping):
        if step.get("type") != "Sequence":
            yield {"type": "", **step}
        for each in step.get(parts, []):
            yield from steps(each, parts)


def _replaces_spaces(step: Mapping[str, Any]) -> bool:
    pattern = step.get("pattern", {}).get("Regex")
    return step["type"] == "Replace" and pattern in SPACES and step.get("content") in (" ", "\u2581")


def _begins_with_a_space(step: Mapping[str, Any]) -> bool:
    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
    return step["type"] == "Metaspace" and scheme != "never" and step.get("replacement") == "\u2581"


def _refused(where: Path, what: str, step: Mapping[str, Any]) -> ArtifactError:
    files = "spiece.model or vocab.json and merges.txt"
    return ArtifactError(f"{where} has a {what} that cannot be imported, {dict(step)!s:.100}: add {files}")
