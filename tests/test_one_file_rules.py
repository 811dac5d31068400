"""The search in a file that generates by itself, beside ours: random options, all at once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.base.errors import LimitError
from tformer_deploy.decoding import DecodeOptions, decode
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.layouts.one_file import FILE
from tformer_deploy.export.layouts.one_file.feeding import feed_of, feed_sources
from tformer_deploy.translate.batches import make_batch

from .conftest import ending_model, random_sources
from .test_layout_one_file import require_equal, saved

POSITIONS, TRIALS = 14, 20
BAKED: dict[str, dict[str, Any]] = {
    "usual": {},
    "gnmt, estimate": {"length_norm": "gnmt", "stop": "estimate", "max_ratio": 1.7},
    "exact": {"stop": "exact", "end_ids": (3, 9), "min_ratio": 0.5},
    "patient": {"patience": 2.0, "forced_end": True},
    "hasty": {"patience": 0.6, "forced_end": True, "end_ids": (5, 3, 8), "max_ratio": 1.2},
    "first": {"first_ids": (6,), "first_adds_zero": True},
    "endless": {"endless": True, "max_ratio": 2.0},
}
"""Options that are constants of a file."""


def drawn(rng: random.Random, baked: dict[str, Any], vocab: int) -> DecodeOptions:
    """Some of the options that a file takes as inputs."""
    beams = rng.choice([1, 2, 3, 4, 7])
    most = rng.randint(3, POSITIONS + 2)
    usual = [i for i in range(4, vocab) if i not in baked.get("end_ids", ())]
    found: dict[str, Any] = {"beams": beams, "n_best": rng.randint(1, beams), "max_tokens": most}
    chances = {
        "min_tokens": lambda: rng.randint(0, most),
        "length_penalty": lambda: rng.choice([-1.0, 0.0, 0.6, 2.0]),
        "repetition_penalty": lambda: rng.choice([0.5, 1.3, 2.5]),
        "no_repeat_ngram": lambda: rng.randint(1, 4),
        "suppress": lambda: tuple(rng.sample(usual, rng.randint(1, 6))),
        "bad_words": lambda: tuple(tuple(rng.choices(usual, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 9))),
        "first_ids": lambda: tuple(rng.sample(usual, rng.randint(1, 2))),
    }
    found |= {name: draw() for name, draw in chances.items() if rng.random() < 0.4}
    if beams == 1 and "patience" in baked:
        baked = {**baked, "patience": max(0.5, baked["patience"])}
    return DecodeOptions(**{**found, **baked})


@pytest.mark.long
@pytest.mark.parametrize("name", BAKED)
def test_outputs_are_those_of_our_search(name: str, tmp_path: Path) -> None:
    """All outputs of all sentences, their values, and whether they have ended."""
    model, baked = ending_model(POSITIONS), BAKED[name]
    session = saved(model, DecodeOptions(**{"beams": 4, **baked}), tmp_path / FILE)
    rng, shown, several = random.Random(name), set(), 0
    with EagerEngine(model) as engine:
        for trial in range(TRIALS):
            options = drawn(rng, baked, model.config.tgt_vocab)
            ids, lengths = random_sources(rng.randint(1, 6), rng.randint(1, POSITIONS), trial)
            sources = [row[:size].tolist() for row, size in zip(ids, lengths, strict=True)]
            try:
                wanted = decode(engine, make_batch(sources, 1), options)
            except LimitError:  # forced tokens do not fit
                continue
            feed = {**feed_sources(sources, 1), **feed_of(options)}
            require_equal(session.run(None, feed), wanted, options.n_best)
            shown |= {tuple(output.ids) for outputs in wanted for output in outputs}
            several += any(len(outputs) > 1 for outputs in wanted)
    assert len(shown) > TRIALS and several > TRIALS // 4
