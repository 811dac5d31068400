"""Decoding over the Engine protocol: greedy, beam search, sampling, scoring. numpy only, blind to the backend."""

from .options import DecodeOptions
from .rules import Trie
from .scoring import forced_steps, score
from .search import Batch, Hypothesis, Step, decode

__all__ = ["Batch", "DecodeOptions", "Hypothesis", "Step", "Trie", "decode", "forced_steps", "score"]
