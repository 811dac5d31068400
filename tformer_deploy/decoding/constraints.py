"""What an output must contain, and how far a hypothesis has come: phrases, and choices of phrases.

The states follow constrained beam search in transformers 4 (Post and Vilar 2018 have the idea of banks), so that the
same tokens are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import ConfigError


class Constraint:
    """Phrases of token ids, one of which an output must contain."""

    def __init__(self, phrases: Sequence[Sequence[int]], name: str) -> None:
        if not phrases or not all(phrases):
            raise ConfigError(f"{name}={phrases!r:.80}: give at least one token id for each phrase")
        self.phrases = [[_whole(token, name) for token in phrase] for phrase in phrases]
        self.longest = max(map(len, self.phrases))
        self.root: dict[int, Any] = {}
        for phrase in self.phrases:
            node = self.root
            for token in phrase:
                node = node.setdefault(token, {})
        if sum(1 for _ in _leaves(self.root)) != len(self.phrases):
            raise ConfigError(f"{name}={phrases!r:.80}: no phrase may be the beginning of another one")

    def after(self, path: Sequence[int]) -> list[int]:
        """The tokens that continue a phrase; none: it is complete."""
        node = self.root
        for token in path:
            node = node[token]
        return list(node)


class PhrasalConstraint(Constraint):
    """An output must contain these tokens, one after the other."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__([token_ids], "token_ids")
        self.token_ids = self.phrases[0]


class DisjunctiveConstraint(Constraint):
    """An output must contain one of these sequences of tokens."""

    def __init__(self, nested_token_ids: Sequence[Sequence[int]]) -> None:
        super().__init__(nested_token_ids, "nested_token_ids")
        self.token_ids = self.phrases


def _whole(token: Any, name: str) -> int:
    if isinstance(token, bool) or not isinstance(token, int) or token < 0:
        raise ConfigError(f"{name}: {token!r:.40} is no token id: give whole numbers of at least 0")
    return token


def _leaves(node: dict[int, Any]) -> Any:
    """The ends of all phrases below a node."""
    for following in node.values():
        if following:
            yield from _leaves(following)
        else:
            yield following


@dataclass
class Progress:
    """How far a hypothesis has fulfilled all constraints. At most one of them is begun at a time."""

    constraints: Sequence[Constraint]
    pending: list[Constraint] = field(default_factory=list)
    """Not begun, in the order in which they are tried."""
    begun: Constraint | None = None
    path: list[int] = field(default_factory=list)
    """The tokens of `begun` so far."""
    complete: int = 0

    @classmethod
    def of(cls, constraints: Sequence[Constraint], ids: Sequence[int]) -> Progress:
        """After a hypothesis's tokens, the start token among them."""
        made = cls(constraints, [*constraints])
        for token in ids:
            made.add(token)
            if made.done:
                break
        return made

    @property
    def done(self) -> bool:
        """Whether every constraint is fulfilled."""
        return self.complete == len(self.constraints)

    @property
    def bank(self) -> int:
        """The number of tokens that count as fulfilled; a constraint counts as long as the longest one."""
        longest = max(each.longest for each in self.constraints)
        if not self.begun:
            return self.complete * longest
        return self.complete * longest + longest - (self.begun.longest - len(self.path))

    def following(self) -> list[int]:
        """The tokens that make progress; those of the begun constraint alone if there is one."""
        if self.begun:
            return self.begun.after(self.path)
        return [token for each in self.pending for token in each.after(())]

    def add(self, token: int) -> None:
        """Count a token: it continues the begun constraint, or ends it without success, or begins a pending one."""
        if self.done:
            return
        if self.begun:
            if token in self.begun.after(self.path):
                self.path.append(token)
            else:
                self.pending.append(self.begun)
                self.begun, self.path = None, []
                return
        else:
            self.begun = next((each for each in self.pending if token in each.root), None)
            if not self.begun:
                return
            # By identity: two constraints may want the same phrase.
            self.pending = [each for each in self.pending if each is not self.begun]
            self.path = [token]
        if not self.begun.after(self.path):
            self.complete += 1
            self.begun, self.path = None, []

    def with_token(self, token: int) -> Progress:
        """A copy after one more token."""
        # The reference's copies of a choice share the list of its tokens: of several that continue it, only the first
        # counts. The copies of a phrase, which one token continues, cannot show it.
        shared = self.path if self.begun and len(self.begun.phrases) > 1 else [*self.path]
        made = Progress(self.constraints, [*self.pending], self.begun, shared, self.complete)
        made.add(token)
        return made
