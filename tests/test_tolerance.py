"""Limits: what a recipe leaves out is its precision's own, plans have theirs in the recipe, a bundle widens none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.recipe import (
    HALVES,
    TOLERANCES,
    Recipe,
    Tolerance,
    load_recipe,
    own_limits,
    recipe_from_dict,
)
from tformer_deploy.check import CheckOptions, Gate, make_corpus
from tformer_deploy.engines.base import Engine

INT4 = {"target": "ort-cpu", "cache": "static", "precision": "int4", "group_size": 64}
TRT = {"target": "trt", "cache": "static"}


def test_what_a_recipe_leaves_out_is_its_precisions_own() -> None:
    assert recipe_from_dict(INT4).tolerance == TOLERANCES["int4"]
    found = recipe_from_dict({**INT4, "tolerance": {"scores": 2.0}}).tolerance
    assert found == dataclasses.replace(TOLERANCES["int4"], scores=2.0)


def test_bf16_of_programs_is_not_that_of_plans() -> None:
    program = recipe_from_dict({"target": "native", "cache": "static", "precision": "bf16"})
    assert program.tolerance == own_limits("native", "bf16") != TOLERANCES["bf16"] == own_limits("trt", "bf16")
    assert load_recipe("native-bf16").tolerance == program.tolerance
    assert own_limits("native", "int8") == TOLERANCES["int8"]


def test_plans_have_their_limits_in_the_recipe() -> None:
    recipe = recipe_from_dict({**TRT, "plans": {"fp16": {"scores": 0.01}}})
    assert recipe.limits("fp32") == TOLERANCES["fp32"] and recipe.limits("bf16") == TOLERANCES["bf16"]
    assert recipe.limits("fp16") == dataclasses.replace(TOLERANCES["fp16"], scores=0.01)
    assert recipe_from_dict(json.loads(json.dumps(dataclasses.asdict(recipe)))) == recipe
    named = load_recipe("trt")
    assert {name: named.limits(name) for name in HALVES} == {name: TOLERANCES[name] for name in HALVES}


@pytest.mark.parametrize("name", ["fp32", "fp32-attention", "fp32-cpu", "int8", "int8-latency", "int4", "trt"])
def test_a_named_recipe_states_its_limits(name: str) -> None:
    """In its file, so that nobody has to look elsewhere."""
    from tformer_deploy.bundle.recipe import recipe_folder

    text = (recipe_folder() / f"{name}.toml").read_text()
    for limit in ("encoder", "scores", "bleu", "top1"):
        assert f"\n{limit} = " in text, limit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tolerance": {"ties": 1.1}}, "tolerance.ties=1.1: must be a share from 0 to 1"),
        ({"tolerance": {"top1": -0.1}}, "tolerance.top1=-0.1: must be a share"),
        ({"tolerance": 5}, r"\[tolerance\]: must be a table"),
        ({"plans": {"fp16": {}}}, r"\[plans\] with target=onnx: only target = 'trt' has plans"),
        ({**TRT, "plans": {"fp8": {}}}, "unknown table of \\[plans\\] 'fp8'"),
        ({**TRT, "plans": []}, r"\[plans\]: must be a table"),
        ({**TRT, "plans": {"bf16": {"score": 1}}}, r"unknown key of \[plans.bf16\] 'score'"),
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_from_dict(changes)


def test_what_two_accept_is_the_narrower_of_each() -> None:
    loose = Tolerance(scores=1.0, tokens=False, unstable=0.5, ties=0.5, top1=0.5)
    tight = Tolerance(encoder=1.0)
    assert loose.within(tight) == tight.within(loose) == Tolerance()
    assert loose.wider(tight) == ["scores", "tokens", "unstable", "ties", "top1"] and tight.wider(loose) == ["encoder"]


class Half(Gate):
    """Its engine says that it is a plan in fp16."""

    def engine(self, name: str) -> Engine:
        made = super().engine(name)
        made.precision = "fp16"
        return made


@pytest.mark.parametrize(("scores", "loosened"), [(0.01, []), (9.0, ["scores"])])
def test_a_plan_is_held_to_the_recipe(scores: float, loosened: list[str], bundle: Path, run: Path) -> None:
    opened = open_bundle(bundle)
    limits = dataclasses.replace(TOLERANCES["fp16"], scores=scores)
    recipe: Recipe = dataclasses.replace(opened.recipe, target="trt", cache="static", plans={"fp16": limits})
    options = CheckOptions(max_tokens=4, beams=2, n_best=2, invariance=1, vocabulary=False, walks=0)
    for allowed in (True, False):
        gate = Half(dataclasses.replace(opened, recipe=recipe), run, threads=1, loosened=allowed)
        corpus = make_corpus(opened.config, opened.recipe, opened.tokenizers(), None, options)
        (found,) = gate.run(["eager"], gate.reference(corpus)).engines
        within = scores if allowed else min(scores, TOLERANCES["fp16"].scores)
        assert found.passed and found.tolerance == dataclasses.replace(limits, scores=within)
        assert found.loosened == (loosened if allowed else []) and found.precision == "fp16"
