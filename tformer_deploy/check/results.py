"""Results of single comparisons, the parts of a report."""

from __future__ import annotations

from dataclasses import dataclass, field

WIDTHS, MANY, FULL, LATE, JOINED = KINDS = ("widths", "many rows", "full batches", "late rows", "joined rows")
"""Kinds of walks: every width, as many rows as a translator makes, full batches, up to the last position, joining."""


@dataclass
class Divergence:
    """The first decision that differs between two runs of a sentence."""

    sentence: int
    """Index in the corpus, from 0."""
    mode: str
    """`greedy`, `beam` or `sampling`."""
    variant: str
    """Batch of the invariance check in which the engine differs from itself; empty: it differs from eager."""
    step: int
    """Index of the token, from 0; if only the order of a beam's outputs differs, that of the output."""
    eager_token: int
    engine_token: int
    eager_score: float
    """Eager's score of its own choice: of a beam the sum of the candidate, else the token's log-probability."""
    engine_score: float
    """The engine's score of its own choice."""
    margin: float
    """By how much eager prefers its own choice to the engine's; infinite if that was not among its candidates."""
    moved: float = 0.0
    """Of a beam: largest difference between the two runs' scores of the same candidates, up to this step."""


@dataclass
class Outputs:
    """Outputs of a mode or of an invariance check, compared sentence by sentence."""

    mode: str
    variant: str = ""
    """Empty: engine against eager; else the engine against itself in another batch."""
    sentences: int = 0
    equal: int = 0
    ties: int = 0
    """Sentences that differ, but by a margin within the measured error."""
    failed: int = 0
    not_blamed: int = 0
    """Sentences for which eager differs between the two batches too."""
    score_max: float = 0.0
    """Largest difference of scores of equal outputs."""
    hopeless: int = 0
    """Failed sentences that no rounding explains: one is enough for the engine to fail."""


@dataclass
class Layer:
    """Difference of a layer's output from eager's, under teacher forcing on one sentence."""

    name: str
    difference: float
    """Largest absolute difference at real positions."""
    largest: float
    """Largest absolute value of eager's output."""
    noise: float = 0.0
    """Root mean square of the differences."""
    limit: float | None = None
    """Limit of `noise`, if calibration has measured it."""


@dataclass
class Constants:
    """The constants of an engine's graphs, compared with the checkpoint's tensors."""

    compared: int = 0
    equal: int = 0
    unknown: list[str] = field(default_factory=list)
    """`GRAPH: NAME` of constants that are made of no tensor of the checkpoint."""
    wrong: list[str] = field(default_factory=list)
    """A line for each constant that differs."""
    skipped: str = ""
    """Why nothing was compared, if nothing was."""


@dataclass
class Memory:
    """The encoder's output compared with eager's, of graphs that return it."""

    sentences: int = 0
    largest: float = 0.0
    """Largest absolute difference, padding left out."""
    worst: int = 0
    """Index of that sentence."""
    cosine: float = 1.0
    """Smallest cosine between both sides' means over a sentence's tokens."""
    many: int = 0
    """Sentences of the largest batch."""
    many_apart: float = 0.0
    """Largest difference from the same sentences in a small batch."""


@dataclass
class Top1:
    """The best tokens of all steps compared with eager's, under teacher forcing."""

    steps: int = 0
    equal: int = 0
    near: int = 0
    """Steps with another token, which eager scores within `parity.NEAR` of its best."""

    @property
    def differ(self) -> int:
        """Steps with a worse token."""
        return self.steps - self.equal - self.near

    @property
    def share(self) -> float:
        """Share of the steps that agree."""
        return 1 - self.differ / max(1, self.steps)


@dataclass
class Entries:
    """The entries of one side's vocabulary, each fed once."""

    side: str
    """`source`: elements of the encoder's outputs are compared; `target`: log-probabilities."""
    count: int
    largest: float
    """Largest absolute difference."""
    worst: int
    """Id of the entry that has it."""


@dataclass
class Walk:
    """Rows that were fed given tokens, compared with the same rows alone, see `walks`."""

    kind: str
    """Of `KINDS`."""
    width: int
    """Beams."""
    rows: int = 0
    """Compared rows, over all steps."""
    steps: int = 0
    wrong: int = 0
    """Rows whose scores differ by more than `limit`."""
    largest: float = 0.0
    """Largest absolute difference of a log-probability."""
    limit: float = 0.0
    first: str = ""
    """The first wrong row."""

    @property
    def name(self) -> str:
        """A name for failures."""
        return f"rows of {self.width} beams" if self.kind == WIDTHS else f"{self.kind} of {self.width} a sentence"

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.wrong:,} of {self.rows:,} differ from the same rows alone by up to "
            f"{self.largest:.2g}, more than {self.limit:g} (tolerance.scores), the first: {self.first}"
        )


@dataclass
class StepDifference:
    """Differences of log-probabilities at one position of the target."""

    largest: float
    mean: float
    sentences: int
