"""Decoding over the Engine protocol: greedy, beam search, sampling, scoring. numpy only, blind to the backend."""

from .options import DecodeOptions
from .rules import Trie
from .scoring import forced_steps, score
from .search import Batch, ContinuousBatch, Hypothesis, Search, Step, decode

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
    "score",
]
