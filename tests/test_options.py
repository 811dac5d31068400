"""A model with all that ours is not by default, in every target: exported, checked, built into plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from tformer_deploy.bundle.plans import Profile
from tformer_deploy.export.build import build
from tformer_deploy.export.checked import export_checked
from tformer_deploy.export.trt_builder import BuildOptions

from .configs import EVERYTHING, OTHERS, T5
from .conftest import small_config, write_checkpoint, write_lines
from .params import long_but
from .test_seq2seq import RECIPES


@pytest.mark.parametrize("options", long_but({"everything": EVERYTHING, "T5": T5, "others": OTHERS}, "T5"))
def test_options_in_every_target(options: dict[str, object], tmp_path: Path) -> None:
    run, text = write_checkpoint(tmp_path / "run", small_config(**options)), write_lines(tmp_path / "text")
    report = export_checked(run, tmp_path / "bundle", RECIPES, text)
    assert report.passed and len(report.engines) == len(RECIPES), str(report)
    assert all(each.constants and not each.constants.wrong for each in report.engines)
    plans = build(tmp_path / "bundle", BuildOptions("fp16"), [Profile(2, 2, 12, 16)], text).plans
    assert sorted(plan.graph for plan in plans) == ["decoder_step", "encoder"]
    assert all(plan.layers["matrix_multiply"].get("half", 0) > 0 for plan in plans)
