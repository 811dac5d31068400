"""`pipeline` and `generate` over the CPU engine, against transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tformer_deploy import TformerForSeq2SeqLM, pipeline

from .test_pipelines import TEXTS


@pytest.mark.long
@pytest.mark.parametrize("beams", [1, 4])
def test_the_cpu_engine_gives_the_tokens_of_transformers(
    beams: int, native: TformerForSeq2SeqLM, native_folder: Path
) -> None:
    """Greedily and with a beam in its own search, and with a rule that only ours in Python knows."""
    import transformers

    draw = random.Random(5)
    rows = [[*(draw.randrange(8, 100) for _ in range(count)), 0] for count in (3, 7, 5, 9, 4, 6)]
    most = max(map(len, rows))
    pad = native.translator.engine.config.pad_id
    ids = torch.tensor([row + [pad] * (most - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (most - len(row)) for row in rows])
    theirs: Any = transformers.MarianMTModel.from_pretrained(native_folder)  # type: ignore[no-untyped-call]
    for arguments in ({}, {"begin_suppress_tokens": list(range(10, 90))}):
        asked = {"num_beams": beams, "max_new_tokens": 12, **arguments}
        wanted = theirs.generate(ids, attention_mask=mask, **asked)
        assert native.generate(ids, mask, **asked).tolist() == wanted.tolist(), asked
        assert len({tuple(row) for row in wanted.tolist()}) > 3


@pytest.mark.long
def test_a_variant_of_the_cpu_engine_is_chosen(native_folder: Path) -> None:
    with pipeline(
        "translation", model=native_folder, backend="native", variant="native-int8", compare=False
    ) as translate:
        assert translate.model.translator.engine.variant == "native-int8"
        assert all(record["translation_text"] for record in translate(TEXTS, max_new_tokens=12))


@pytest.fixture(scope="module")
def native_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of Marian's, and a cache of its own."""
    from . import hf_folders

    pytest.importorskip("tformer_native")
    root = tmp_path_factory.mktemp("native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        yield hf_folders.FOLDERS["marian"](root / "marian")


@pytest.fixture(scope="module")
def native(native_folder: Path) -> Iterator[TformerForSeq2SeqLM]:
    with TformerForSeq2SeqLM.from_pretrained(native_folder, backend="native", compare=False) as model:
        yield model
