"""Decoding over the Engine protocol: greedy, beam search, sampling, scoring.

In: a batch of token ids, options and an engine. Out: hypotheses with their scores. It sees `engines.base` alone.
The reference for the search in C++; `translate`, `check` and `bench` use it.
"""

from ..engines.base import Batch, Hypothesis, Request
from .checks import check_options, check_search
from .options import DecodeOptions, Decoding, over_defaults
from .rules import Trie, check_forced, longest_outputs
from .running import ContinuousBatch, continuous, decode, each_token, make_search
from .scoring import forced_steps, score
from .search import Search, Step

__all__ = [
    "Batch",
    "ContinuousBatch",
    "DecodeOptions",
    "Decoding",
    "Hypothesis",
    "Request",
    "Search",
    "Step",
    "Trie",
    "check_forced",
    "check_options",
    "check_search",
    "continuous",
    "decode",
    "each_token",
    "forced_steps",
    "longest_outputs",
    "make_search",
    "over_defaults",
    "score",
]
