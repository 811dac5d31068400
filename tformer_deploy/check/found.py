"""The parts of a report: what was compared with what, and how it came out."""

from __future__ import annotations

from dataclasses import dataclass, field

WIDTHS, MANY, FULL, LATE, JOINED = KINDS = ("widths", "many rows", "full batches", "late rows", "joined rows")
"""Walks: rows of every width, as many as a translator makes, until no positions are left, joining others."""


@dataclass
class Divergence:
    """The first decision at which two runs of a sentence part."""

    sentence: int
    """Index in the corpus, from 0."""
    mode: str
    """`greedy`, `beam` or `sampling`."""
    variant: str
    """The batch of the invariance check in which the engine differs from itself; empty: engine against eager."""
    step: int
    """Index of the token, from 0; for a beam whose outputs merely change places, that of the output."""
    eager_token: int
    engine_token: int
    eager_score: float
    """What eager compares there: the sum of its own candidate, or the log-probability of its token."""
    engine_score: float
    """The same of the engine's own choice, as the engine has it."""
    margin: float
    """How far eager was from the engine's choice; infinite where that was not among its candidates."""
    moved: float = 0.0
    """Of a beam: how far the two runs have the same candidates apart, up to there."""


@dataclass
class Outputs:
    """Outputs of a mode or of an invariance check, compared sentence by sentence."""

    mode: str
    variant: str = ""
    """Empty: engine against eager; else the engine against itself in another batch."""
    sentences: int = 0
    equal: int = 0
    ties: int = 0
    """Sentences that differ where the margin is inside the measured error."""
    failed: int = 0
    not_blamed: int = 0
    """Sentences at which eager itself differs between the two batches."""
    score_max: float = 0.0
    """Largest difference of the scores of outputs that are equal."""
    hopeless: int = 0
    """Of those that failed: by more than any rounding, so that the engine fails however few they are."""


@dataclass
class Layer:
    """How far a layer's output is from eager's, teacher-forced on one sentence."""

    name: str
    difference: float
    """Largest absolute difference at real positions."""
    largest: float
    """Largest absolute value of eager's output."""
    noise: float = 0.0
    """Root mean square of the differences."""
    limit: float | None = None
    """What `noise` may be, where calibration has measured it."""


@dataclass
class Constants:
    """The arrays inside an engine's graphs, beside the checkpoint's tensors that they are functions of."""

    compared: int = 0
    equal: int = 0
    unknown: list[str] = field(default_factory=list)
    """Arrays that are no known function of a tensor of the checkpoint, graph and name."""
    wrong: list[str] = field(default_factory=list)
    """A line for each array that differs."""
    skipped: str = ""
    """Why nothing was compared, if nothing was."""


@dataclass
class Memory:
    """The encoder's output beside eager's, of graphs that return it."""

    sentences: int = 0
    largest: float = 0.0
    """Largest absolute difference, padding left out."""
    worst: int = 0
    """The sentence that has it."""
    cosine: float = 1.0
    """Least cosine of the two sides' means over a sentence's tokens."""
    many: int = 0
    """Sentences of the largest batch."""
    many_apart: float = 0.0
    """How far they are from the same in a small batch."""


@dataclass
class Top1:
    """The best tokens of all steps beside eager's, with eager's greedy tokens fed."""

    steps: int = 0
    equal: int = 0
    near: int = 0
    """Another token, which eager itself has within `parity.NEAR` of its best."""

    @property
    def differ(self) -> int:
        """Steps whose best token is another one."""
        return self.steps - self.equal - self.near

    @property
    def share(self) -> float:
        """Of the steps that agree."""
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
    """Rows that were led through given tokens, beside the same rows alone, see `walks`."""

    kind: str
    """Of `KINDS`."""
    width: int
    """Beams."""
    rows: int = 0
    """Compared, of all steps."""
    steps: int = 0
    wrong: int = 0
    """Rows whose scores are further off than `limit`."""
    largest: float = 0.0
    """Largest absolute difference of a log-probability."""
    limit: float = 0.0
    first: str = ""
    """The first wrong row."""

    @property
    def name(self) -> str:
        """Which rows."""
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
