"""The embeddings of a Hugging Face folder, by whatever names they are stored: transformers' own rules of tying."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..base.errors import ArtifactError
from .base import Parameters
from .toolkit import equal, sharing
from .weights import Weights, renamed

Pairs = tuple[tuple[str, str], ...]
"""Of roles, in order: the first is tied to the second."""
OUTPUT, SOURCE, TARGET = ("output", "shared"), ("source", "shared"), ("target", "shared")
TIED: dict[str, Pairs] = {
    "marian": (OUTPUT, TARGET, SOURCE),
    "pegasus": (OUTPUT, TARGET, SOURCE),
    "m2m_100": (OUTPUT, TARGET, SOURCE),
    "bart": (OUTPUT, TARGET, SOURCE),
    "mbart": (OUTPUT, TARGET, SOURCE),
    "plbart": (OUTPUT, SOURCE, TARGET),
    "blenderbot": (OUTPUT, SOURCE, TARGET),
    "fsmt": (("source", "target"), ("output", "target")),
    "t5": (SOURCE, TARGET, OUTPUT),
    "mt5": (SOURCE, TARGET, OUTPUT),
    "umt5": (SOURCE, TARGET, OUTPUT),
}
"""`all_tied_weights_keys` of each family in transformers, whose order decides where tables are missing."""
ALWAYS_TIED = ("t5", "mt5", "umt5")
"""Whatever `tie_word_embeddings` says."""


def pairs_of(config: Mapping[str, Any]) -> Pairs:
    """What a config.json has tied."""
    kind = str(config["model_type"])
    if kind not in ALWAYS_TIED and not config.get("tie_word_embeddings", kind != "fsmt"):
        return ()
    if kind == "marian" and not config.get("share_encoder_decoder_embeddings", True):
        return (("output", "target"),)
    return TIED[kind]


def resolved(pairs: Pairs, stored: Iterable[str], same: Any) -> dict[str, str]:
    """Of each role, which stored role's table it has; `same(a, b)` says whether two stored tables are equal.

    Source: `PreTrainedModel.tie_weights` of transformers 5, which ties both ways: to whichever table is there.
    """
    found = {role: role for role in stored}
    for i, (role, other) in enumerate(pairs):
        if role in found and other in found:
            if same(found[role], found[other]):
                found[role] = found[other]
        elif role in found:
            found[other] = found[role]
        else:
            later = (each for each, source in pairs[i + 1 :] if source == other and each in found)
            place = other if other in found else next(later, None)
            if place is not None:
                found[role] = found[place]
    return found


@dataclass(frozen=True)
class Tables:
    """Which tensors are the source's embedding, the target's and the output's weights; equal names are one tensor."""

    source: str
    target: str
    output: str

    @classmethod
    def of(cls, weights: Weights, prefix: str, config: Mapping[str, Any]) -> Self:
        """By the names that a file has. Raises ArtifactError where transformers would make one of random numbers."""
        output = "model.decoder.output_projection" if config["model_type"] == "fsmt" else "lm_head"
        names = {
            "shared": f"{prefix}shared.weight",
            "source": f"{prefix}encoder.embed_tokens.weight",
            "target": f"{prefix}decoder.embed_tokens.weight",
            "output": f"{output}.weight",
        }
        stored = [role for role, name in names.items() if name in weights]
        found = resolved(pairs_of(config), stored, lambda a, b: equal(weights, names[a], names[b]))
        for role in ("source", "target", "output"):
            if role not in found:
                known = f"no tensor '{names[role]}', nor another one that config.json ties to it"
                raise ArtifactError(f"{weights.where} has {known}: copy it again")
        weights.ignore(*names.values())
        return cls(*(names[found[role]] for role in ("source", "target", "output")))

    def values(self, weights: Weights) -> dict[str, Any]:
        """Fields of the config."""
        return {
            "src_vocab": weights.shape(self.source, 2)[0],
            "tgt_vocab": weights.shape(self.target, 2)[0],
            "share_embeddings": sharing(self.output == self.target, self.source == self.target),
        }

    def put(self, made: Parameters) -> None:
        """The parameters."""
        made.put("src_embedding.weight", self.source)
        made.put("tgt_embedding.weight", self.target)
        made.put("output.weight", self.output)


def of_whole_model(weights: Weights, base: str, roots: tuple[str, ...]) -> Weights:
    """Tensors as a model with its output names them, all of which begin with one of `roots`.

    transformers puts `base` before a name or takes it away where that gives a name that its model has: a file may be
    of the model without its output, or of one around it.
    """

    def name_of(name: str) -> str:
        rest = name.removeprefix(base)
        if rest != name and rest.startswith(roots):
            found = rest
        else:
            found = base + name if base in roots and not name.startswith(roots) else name
        return name if found in weights else found

    return renamed(weights, name_of)
