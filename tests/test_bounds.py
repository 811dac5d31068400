"""Numbers beyond anything real: one clear line at once, not a machine without memory, a trace or a hang."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.base.machine import cores
from tformer_deploy.bench import BenchPlan, Point
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.engines import make_engine, most_parallel, threads_each
from tformer_deploy.model.config import MOST_OF_MODEL, MOST_OF_TRAINING, ModelConfig, TrainConfig

from .command import failed_line, run_here
from .conftest import pretend_cores

HUGE = 99999999999999


def test_more_threads_than_help_are_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count, most in ((2, 64), (16, 64), (100, 400)):
        pretend_cores(monkeypatch, count)
        assert most_parallel() == most
        assert threads_each(most, 1) == threads_each(most, most) == most
        assert threads_each(0, most) == 1 and threads_each(0, 1) == count
        for threads, workers in ((most + 1, 1), (-1, 1), (1, 0), (1, most + 1), (0, HUGE)):
            with pytest.raises(ConfigError, match=rf"^(threads|workers)=.*: must be a whole number from . to {most}$"):
                threads_each(threads, workers)
        for name in ("ort", "eager"):
            with pytest.raises(ConfigError, match=f"^threads={most + 1}: "):
                make_engine(name, open_bundle(bundle), threads=most + 1)


@pytest.mark.parametrize("name", MOST_OF_MODEL)
def test_sizes_of_a_model_have_bounds(name: str) -> None:
    wide = {"heads": {"d_model": 1 << 12}, "d_model": {"heads": 1}}.get(name, {})
    values = {"src_vocab": 8, "tgt_vocab": 8, "share_embeddings": "none", **wide}
    ModelConfig(**{**values, name: MOST_OF_MODEL[name]})  # type: ignore[arg-type]
    for value in (MOST_OF_MODEL[name] + 1, 10**12, 10**30):
        with pytest.raises(ConfigError, match=f"^{name}={value}: must be at most {MOST_OF_MODEL[name]}$"):
            ModelConfig(**{**values, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MOST_OF_TRAINING)
def test_sizes_of_a_training_have_bounds(name: str) -> None:
    TrainConfig(**{name: MOST_OF_TRAINING[name]})
    for value in (MOST_OF_TRAINING[name] + 1, 10**30):
        with pytest.raises(ConfigError, match=f"^{name}={value}: must be at most"):
            TrainConfig(**{name: value})


@pytest.mark.parametrize("name", ["max_tokens", "n_best", "beams", "top_k", "no_repeat_ngram", "min_tokens"])
def test_counts_of_decoding_have_bounds(name: str) -> None:
    for value in (1 << 31, 10**400):
        with pytest.raises(ConfigError, match=f"^{name}=.*: must be at least [01] and less than 2147483648$"):
            DecodeOptions(**{"sampling": name in ("top_k", "n_best"), name: value})


@pytest.mark.parametrize("name", ["max_ratio", "min_ratio", "patience", "coverage_penalty"])
def test_factors_of_decoding_have_bounds(name: str) -> None:
    """1e308 of several is infinite."""
    assert DecodeOptions(**{name: 1e6, "beams": 4})
    with pytest.raises(ConfigError, match=rf"^{name}=1e\+308: must be (between 0 and|at most) 1e\+(06|300)$"):
        DecodeOptions(**{name: 1e308, "beams": 4})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("translate", "--threads", HUGE), f"threads={HUGE}: must be a whole number from 0 to "),
        (("translate", "--workers", 10_000), "workers=10000: must be a whole number from 1 to "),
        (("translate", "--batch-tokens", HUGE), f"batch_tokens={HUGE}: must be a whole number from 0 to 16777216"),
        (("translate", "--beams", HUGE), f"beams={HUGE}: must be at least 1 and less than"),
        (("translate", "--sample", "--n-best", HUGE), f"n_best={HUGE}: must be at least 1 and less than"),
        (("translate", "--max-tokens", HUGE), f"max_tokens={HUGE}: must be at least 1 and less than"),
        (("translate", "--sample", "--seed", 10**20), f"seed={10**20}: must be at least 0 and less than"),
        (("translate", "--set", f"beams={'9' * 5000}"), "must be a whole number"),
        (("check", "--threads", 100_000), "threads=100000: must be a whole number from 0 to "),
        (("bench", "--batch", 100_000_000), "--batch 100000000: ort takes at most "),
        (("bench", "--batch", "9" * 5000), "999: write whole numbers with commas"),
        (
            ("bench", "--backend", "eager", "--batch", 1 << 16, "--beam", 1 << 16, "--new-tokens", 2),
            "at most 1048576 rows are measured",
        ),
        (("bench", "--new-tokens", 10**30), "ort takes at most 24"),
        (("bench", "--rounds", HUGE), f"rounds={HUGE}: must be a whole number from 1 to 1000000"),
        (("bench", "--seconds", "inf"), "seconds=inf: must be a number from 0 to 3600"),
        (("bench", "--seconds", "1e300"), "seconds=1e+300: must be a number from 0 to 3600"),
        (("bench", "--max-tokens", HUGE), f"max_tokens={HUGE}: must be a whole number from 1 to"),
        (("bench", "--threads", HUGE), f"threads={HUGE}: must be a whole number from 0 to "),
        (("bench", "--workers", HUGE), f"workers={HUGE}: must be a whole number from 1 to "),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, tuple) else "",
)
def test_options_have_bounds(bundle: Path, arguments: tuple[object, ...], words: str) -> None:
    verb, *options = arguments
    done = run_here(verb, bundle, *options, stdin=b"w5\n")
    assert words in failed_line(done) and done.stdout == b"" and len(done.stderr) < 400


def test_too_many_workers_are_refused_before_input_comes(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def windows(*_: object) -> Iterator[list[str]]:
        raise AssertionError("standard input is read")
        yield

    monkeypatch.setattr("tformer_deploy.cli.translate.windows", windows)
    assert "workers=1000:" in failed_line(run_here("translate", bundle, "--workers", 1000))


def test_a_plan_of_a_benchmark_has_bounds(bundle: Path) -> None:
    here = cores()
    for values in ({"threads": 0}, {"workers": 0}, {"rounds": 0}, {"rounds": 1.5}, {"seconds": math.nan}):
        with pytest.raises(ConfigError, match=rf"^{min(values)}=.*: must be a"):
            BenchPlan(
                **{"bundle": bundle, "engines": ("ort",), "points": (Point(1, 1, 3, 2),), "threads": here, **values}
            )  # type: ignore[arg-type]
