"""Decoding over the Engine protocol: greedy, beam search, sampling, scoring. numpy only, blind to the backend."""

from ..engines.base import Batch, Hypothesis
from .options import DecodeOptions, over_defaults
from .rules import Trie
from .running import ContinuousBatch, decode
from .scoring import forced_steps, score
from .search import Search, Step

__all__ = [
    "Batch",
    "ContinuousBatch",
    "DecodeOptions",
    "Hypothesis",
    "Search",
    "Step",
    "Trie",
    "decode",
    "forced_steps",
    "over_defaults",
    "score",
]
