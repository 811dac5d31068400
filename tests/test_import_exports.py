"""An imported model is exported and checked as any other: the one with most that is unusual."""

from __future__ import annotations

from pathlib import Path

import pytest

from tformer_deploy.export.checked import export_checked
from tformer_deploy.importers.run import import_checkpoint

from .test_import_ctranslate2 import CASES, Model

pytestmark = pytest.mark.long


def test_exports(tmp_path: Path) -> None:
    """Post-norm, an entry of zeros that starts and is never produced, positions of a file."""
    model = Model(**CASES["marian"])
    for name, tensor in model.stored.items():
        if name.endswith("weight"):
            tensor *= 0.5  # as large as those of trained models, which int8 is meant for
    path = model.write(tmp_path / "model")
    import_checkpoint("ctranslate2", path, tmp_path / "run", comparing=False)
    export_checked(tmp_path / "run", tmp_path / "bundle", ["fp32", "fp32-cpu", "int8"])
