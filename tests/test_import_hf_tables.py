"""Names under which folders of Hugging Face store their tables: whatever `from_pretrained` makes of them is right."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.importers import compare, hf
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.hf_tables import Tables, of_whole_model
from tformer_deploy.importers.run import import_checkpoint
from tformer_deploy.importers.weights import read_folder

from .hf_folders import FOLDERS, LINES, OPTIONS
from .params import long_but

ROLES = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")


@pytest.fixture(autouse=True)
def short_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong table is a wrong number everywhere."""
    monkeypatch.setattr(compare, "MOST_STEPS", 8)
    monkeypatch.setattr(compare, "BEAMS", (1,))


def names_of(kind: str) -> dict[str, str]:
    """Where a family has its tables."""
    prefix = "" if kind in hf.T5_FAMILY else "model."
    names = {role: f"{prefix}{role}.weight" for role in ROLES[:3]} | {"lm_head": "lm_head.weight"}
    return {**names, "lm_head": "model.decoder.output_projection.weight"} if kind == "fsmt" else names


def stored(folder: Path, tables: Mapping[str, Tensor], **said: Any) -> None:
    """Exchange a folder's tables for others, and keys of its config.json."""
    config = json.loads((folder / "config.json").read_text())
    names = names_of(config["model_type"])
    kept = {n: t for n, t in load_file(folder / "model.safetensors").items() if n not in names.values()}
    written = {names[role]: table.clone() for role, table in tables.items()}
    save_file({**kept, **written}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, **said}))


def table_of(folder: Path) -> Tensor:
    """One of a folder's tables."""
    names = names_of(json.loads((folder / "config.json").read_text())["model_type"]).values()
    return next(tensor for name, tensor in load_file(folder / "model.safetensors").items() if name in names)


LAYOUTS: dict[str, tuple[str, dict[str, float]]] = {
    "bart, the decoder's alone": ("bart", {"decoder.embed_tokens": 0}),
    "bart, both sides'": ("bart", {"encoder.embed_tokens": 0, "decoder.embed_tokens": 0}),
    "t5, the decoder's alone": ("t5", {"decoder.embed_tokens": 0}),
    "t5, the decoder's and an output of its own": ("t5", {"decoder.embed_tokens": 0, "lm_head": 0.1}),
    "m2m_100, the output's alone": ("m2m_100", {"lm_head": 0}),
    "plbart, sides that differ": ("plbart", {"encoder.embed_tokens": 0, "decoder.embed_tokens": 0.1}),
    "marian, all": ("marian", dict.fromkeys(ROLES, 0)),
}
"""A family, and of each table that is stored what is added to it."""


QUICK = "bart, the decoder's alone", "t5, the decoder's and an output of its own"


@pytest.mark.parametrize("layout", long_but(list(LAYOUTS), *QUICK))
def test_tied_tables_under_other_names(layout: str, tmp_path: Path) -> None:
    """facebook/bart-large-cnn and madlad400 are said to be stored as the first and the fourth."""
    name, tables = LAYOUTS[layout]
    folder = FOLDERS[name](tmp_path / "folder")
    table = table_of(folder)
    stored(folder, {role: table + more for role, more in tables.items()})
    options = ImportOptions(**OPTIONS.get(name, {}))
    _, comparison = import_checkpoint("hf", folder, tmp_path / "run", options, LINES[:5])
    assert comparison.passed and comparison.original, comparison


def of_transformers(folder: Path) -> dict[str, Tensor] | None:
    """The tables that `from_pretrained` gives the source, the target and the output; None where it lacks one."""
    import transformers

    logging: Any = transformers.logging
    logging.set_verbosity_error()
    auto: Any = transformers.AutoModelForSeq2SeqLM
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    names = names_of(model.config.model_type)
    if set(info["missing_keys"]) & {names[role] for role in ROLES[1:]}:
        return None
    found = zip(("source", "target", "output"), ROLES[1:], strict=True)
    return {ours: model.get_parameter(names[role]) for ours, role in found}


def of_ours(folder: Path) -> dict[str, Tensor] | None:
    """Ours, None where the folder is refused."""
    config = json.loads((folder / "config.json").read_text())
    t5 = config["model_type"] in hf.T5_FAMILY
    weights = of_whole_model(read_folder(folder), *(hf.T5_NAMES if t5 else hf.NAMES))
    try:
        tables = Tables.of(weights, "" if t5 else "model.", config)
    except ArtifactError as error:
        assert "nor another one that config.json ties to it: copy it again" in str(error)
        return None
    return {role: weights.take(getattr(tables, role)) for role in ("source", "target", "output")}


def layouts(names: tuple[str, ...], table: Tensor) -> list[dict[str, Tensor]]:
    """Every choice of tables, all of them equal, all different, or only the last."""
    chosen = [some for count in range(1, 5) for some in itertools.combinations(names, count)]
    steps = ((0, 0, 0, 0), (1, 2, 3, 4), (1, 1, 1, 2))
    return [
        {role: table + more for role, more in zip(some, step[-len(some) :], strict=True)}
        for some in chosen
        for step in (steps if len(some) > 1 else steps[:1])
    ]


@pytest.mark.parametrize("name", long_but(list(FOLDERS)))
def test_every_layout_gives_the_tables_that_transformers_gives(name: str, tmp_path: Path) -> None:
    folder = FOLDERS[name](tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    table, size = table_of(folder), config["vocab_size" if name != "fsmt" else "src_vocab_size"]
    said = {"vocab_size": size, "decoder_vocab_size": size} if name.startswith("marian") else {}
    said = {"src_vocab_size": size, "tgt_vocab_size": size} if name == "fsmt" else said
    found = set()
    for tables in layouts(ROLES[1:] if name == "fsmt" else ROLES, table[:size]):
        for tied in (True, False):
            for shared in (True, False) if name == "marian" else (True,):
                more = {"share_encoder_decoder_embeddings": shared} if name == "marian" else {}
                stored(folder, tables, **said, tie_word_embeddings=tied, **more)
                theirs, ours = of_transformers(folder), of_ours(folder)
                assert (theirs is None) == (ours is None), (tables.keys(), tied, shared)
                found.add(theirs is None)
                for role in theirs or {}:
                    assert theirs and ours and torch.equal(ours[role], theirs[role]), (role, tables.keys(), tied)
    assert found == {True, False} or name in ("t5", "flan-t5", "mt5", "umt5")


UNREAD = {
    "bart": {"model.encoder.version": torch.ones(1)},
    "m2m_100": {"model.encoder.embed_positions.weights": torch.ones(2, 2), "final_logits_bias": torch.rand(1, 9)},
}
"""What old folders have, and transformers does not read."""


@pytest.mark.parametrize("name", long_but(["bart", "t5", "marian", "m2m_100", "fsmt"], "bart"))
def test_a_model_without_its_output_and_one_within_another(name: str, tmp_path: Path) -> None:
    """`BartModel` saved alone, as facebook/bart-base; and all names one level deeper."""
    folder = FOLDERS[name](tmp_path / "folder")
    options = ImportOptions(**OPTIONS.get(name, {}))
    base = (hf.T5_NAMES if name == "t5" else hf.NAMES)[0]
    tensors = load_file(folder / "model.safetensors")
    alone = {n.removeprefix(base): tensor for n, tensor in tensors.items() if n != "final_logits_bias"}
    for names in (alone, {f"{base}{n}": t for n, t in tensors.items()}, {**tensors, **UNREAD.get(name, {})}):
        save_file(names, folder / "model.safetensors", {"format": "pt"})
        _, comparison = import_checkpoint("hf", folder, tmp_path / "run", options, LINES[:3], force=True)
        assert comparison.passed and comparison.original, comparison
