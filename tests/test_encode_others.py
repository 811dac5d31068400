"""The encoder alone of models that are not ours: an imported one, and modules of a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tformer_deploy.export.checked import export_checked
from tformer_deploy.importers.run import import_checkpoint
from tformer_deploy.translate.encode import EncoderOptions, TextEncoder

from . import hf_folders
from .command import failed_line, run_here
from .test_your_bundles import write
from .user_models import MODELS

FORWARD_ALONE = (
    "the module gives forward alone, so that it has no encoder's output: give encode and decode of UserModel"
)
LINES = ["Two young, white males are outside near many bushes.", "", "A man", "Several men in hard hats are operating."]


def encoded(bundle: Path, lines: list[str], **options: Any) -> list[Any]:
    with TextEncoder(EncoderOptions(bundle, threads=1, pool="none", **options)) as encoder:
        return encoder.encode(lines)


@pytest.mark.long
def test_an_imported_model_gives_what_transformers_gives(tmp_path: Path) -> None:
    """The tokenizer's ids and the encoder's output, for text."""
    import transformers

    folder = hf_folders.marian(tmp_path / "hf")
    import_checkpoint("hf", folder, tmp_path / "run", comparing=False)
    export_checked(tmp_path / "run", tmp_path / "bundle", ["fp32-cpu", "int8"], memory=True)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for variant, limit in (("fp32", 1e-4), ("fp32-cpu", 1e-4), ("int8", 0.5)):
        for line, found in zip(LINES, encoded(tmp_path / "bundle", LINES, variant=variant), strict=True):
            if not line:
                assert found.ids == [] and found.vectors.shape == (0, 32)
                continue
            inputs = tokenizer(line, return_tensors="pt")
            with torch.inference_mode():
                expected = model.get_encoder()(**inputs).last_hidden_state[0].numpy()
            assert found.ids == inputs.input_ids[0].tolist()
            assert np.abs(found.vectors - expected).max() < limit


@pytest.mark.long
@pytest.mark.parametrize("name", ["tutorial, hooks", "marian"])
def test_a_module_with_an_encoder_gives_its_own_output(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    module = f"{tmp_path}/my_file.py:make"
    assert run_here("export", module, "--out", tmp_path / "bundle", "--memory").returncode == 0
    user = MODELS[name]()
    assert user.encode is not None
    for options in ({}, {"backend": "eager", "checkpoint": module}):
        for each in encoded(tmp_path / "bundle", ["w7 w9 w11", "w8"], **options):
            ids = torch.tensor([each.ids])
            with torch.inference_mode():
                expected = user.encode(user.module.eval(), ids, torch.ones_like(ids, dtype=torch.bool))[0].numpy()
            assert each.vectors.shape == expected.shape and np.abs(each.vectors - expected).max() < 1e-5


def test_a_module_that_gives_forward_alone_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "tutorial")
    module = f"{tmp_path}/my_file.py:make"
    done = run_here("export", module, "--out", tmp_path / "bundle", "--memory")
    assert done.returncode == 1 and not (tmp_path / "bundle").exists()
    assert done.stderr.decode().endswith(f"error: memory of {module}: {FORWARD_ALONE}, or leave out --memory\n")


@pytest.mark.long
def test_a_bundle_of_a_module_that_gives_forward_alone_says_so(tmp_path: Path) -> None:
    write(tmp_path, "tutorial")
    module = f"{tmp_path}/my_file.py:make"
    assert run_here("export", module, "--out", tmp_path / "bundle").returncode == 0
    assert "export it again with --memory" in failed_line(run_here("encode", tmp_path / "bundle", stdin=b"w7\n"))
    done = run_here("encode", tmp_path / "bundle", "--backend", "eager", "--checkpoint", module, stdin=b"w7\n")
    assert done.returncode == 1 and FORWARD_ALONE in done.stderr.decode()
