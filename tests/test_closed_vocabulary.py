"""The copy task of The Annotated Transformer: a vocabulary without names for ends and unknown words, as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.decoding import decode, over_defaults
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.run import import_checkpoint
from tformer_deploy.model.checkpoint import open_checkpoint

from .command import printed, run_here
from .plain_annotated import Copying, V, train_to_copy
from .plain_decoding import make_batch

IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 0}


def write(model: Copying, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "model.pt")
    (folder / "words").write_text("".join(f"{i}\n" for i in range(V)))
    return folder / "model.pt"


def imported(path: Path, **ids: int) -> Any:
    options = ImportOptions(path.parent / "words", model=ids)
    return import_checkpoint("annotated", path, path.parent / "run", options, force=True)[0]


def test_ids_without_names_are_asked_for(tmp_path: Path) -> None:
    path = write(Copying(layers=1), tmp_path)
    for ids, words in (
        ({}, r"words: no entry is called <eos> or .*: add it to the vocabulary, or --set model.eos_id=ID, padding's"),
        ({"eos_id": 0}, r"words: no entry is called <unk> or .*: add it to the vocabulary, or --set model.pad_id=ID"),
        ({"eos_id": 0, "pad_id": 0}, r"is called <bos> or .*: name it with --set model.bos_id=ID"),
        ({**IDS, "bos_id": 11}, "model.bos_id=11"),
    ):
        with pytest.raises(ConfigError, match=words):
            imported(path, **ids)
    assert not (tmp_path / "run").exists()


def test_numbers_and_tokens_are_the_notebooks(tmp_path: Path) -> None:
    """Of random weights: outputs end at their length alone, and a word that begins outputs is a word in text."""
    torch.manual_seed(3)
    model = Copying(layers=1).eval()
    found = imported(write(model, tmp_path), **IDS)
    assert found.decoding == {"endless": True} and "no token ends an output" in found.notes[-1]
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.tokenizers.source_ids("1 3 x 10") == [1, 3, 0, 10]
    assert checkpoint.tokenizers.target_text([1, 10, 2]) == "1 10 2"
    src, tgt = torch.randint(1, V, (2, 6, 10))
    with torch.inference_mode():
        ours = checkpoint.load_model()(src, torch.full((6,), 10), tgt).log_softmax(-1)
        assert (ours - model(src, tgt)).abs().max() < 1e-5
    options = over_defaults(checkpoint.decoding, {"max_tokens": 9})
    with EagerEngine(checkpoint.load_model()) as engine:
        outputs = decode(engine, make_batch(src.tolist()), options)
    assert [[1, *output[0].ids] for output in outputs] == [model.greedy(source[None], 10) for source in src]


def test_an_end_without_a_name_ends_outputs(tmp_path: Path) -> None:
    """And no source, as nobody said so."""
    found = imported(write(Copying(layers=1), tmp_path), **{**IDS, "eos_id": 10})
    assert found.decoding == {} and found.config.eos_id == 10
    assert open_checkpoint(tmp_path / "run").tokenizers.source_ids("2 3") == [2, 3]


@pytest.mark.long
def test_the_copy_task_goes_through_import_and_export(tmp_path: Path) -> None:
    model = train_to_copy(400)
    sizes = {**IDS, "max_positions": 16}  # without an end, the check's outputs are as long as they may be
    path, ids = write(model, tmp_path), [f"--set=model.{name}={i}" for name, i in sizes.items()]
    done = run_here("import", path, "--vocab", tmp_path / "words", *ids, "--out", tmp_path / "run")
    assert done.returncode == 0 and b"run: annotated" in done.stdout, done.stderr
    done = run_here("export", tmp_path / "run", "--out", tmp_path / "bundle", "--recipe", "fp32-cpu")
    assert done.returncode == 0, done.stderr
    sources = torch.randint(1, V, (30, 10), generator=torch.Generator().manual_seed(5))
    sources[:, 0] = 1
    lines = "".join(" ".join(map(str, source.tolist())) + "\n" for source in sources)
    found = printed(run_here("translate", tmp_path / "bundle", "--max-tokens", 9, stdin=lines.encode()))
    copied = [[1, *map(int, line.split())] for line in found]
    assert copied == [model.greedy(source[None], 10) for source in sources]
    assert sum(copy == source.tolist() for copy, source in zip(copied, sources, strict=True)) >= 27
