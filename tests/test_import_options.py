"""Every format reads the options that it is said to read, and refuses others."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.importers import hf_text
from tformer_deploy.importers.base import FILES, ImportOptions
from tformer_deploy.importers.run import FORMATS, OPTIONS, import_checkpoint, module_of

from . import import_cases, test_import_ctranslate2, test_import_toolkits
from .command import run_here

NAMES = {each.name for each in fields(ImportOptions)}


class Recorded(ImportOptions):
    """Notes which fields are read, but for those that dataclasses.replace copies."""

    read: set[str] = set()  # noqa: RUF012

    def __getattribute__(self, name: str) -> Any:
        if name in NAMES and sys._getframe(1).f_globals["__name__"] != "dataclasses":
            Recorded.read.add(name)
        return super().__getattribute__(name)


def of_format(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A small source, and the options without which it cannot be read."""
    if name == "hf":
        if not find_spec("transformers"):
            pytest.skip("needs transformers")
        from .hf_folders import OPTIONS as NEEDED
        from .hf_folders import m2m_100

        return m2m_100(folder / "model"), NEEDED["m2m_100"]
    if name == "ctranslate2":
        return test_import_ctranslate2.Model().write(folder / "model"), {}
    if name in test_import_toolkits.KINDS:
        made = test_import_toolkits.KINDS[name]()
        path = made.write(folder)
        return path, {"vocab": path.parent / "vocab.yml"} if name == "marian" else {}
    if name == "multi30k-tutorial" and not find_spec("spacy"):
        pytest.skip("needs spacy")
    case = next(case for case in import_cases.CASES.values() if case.format == name)
    state = case.make()[0]
    torch.save(state, folder / "model.pt")
    words = {
        "src_vocab": import_cases.write_words(folder / "src", 40),
        "tgt_vocab": import_cases.write_words(folder / "tgt", 44),
    }
    return folder / "model.pt", words


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_reads_its_options_alone(name: str, tmp_path: Path) -> None:
    path, needed = of_format(name, tmp_path)
    Recorded.read.clear()
    module_of(name).read(path, Recorded(**needed))
    unread = {"vocab"} if "src_vocab" in needed else set()  # for both sides: each has its own here
    assert Recorded.read == {*OPTIONS[name]} - unread


@pytest.mark.parametrize("name", FORMATS)
def test_others_are_refused(name: str, tmp_path: Path) -> None:
    """Before anything is read; a message names options of the command."""
    values: dict[str, Any] = {"heads": 2, "lower": True, "parts": {"output": "a"}, "model": {"norm_eps": 1e-5}}
    assert {*OPTIONS} == {*FORMATS} and len({*OPTIONS[name]}) == len(OPTIONS[name])
    shown = run_here("import", "--help").stdout.decode()
    for field in NAMES - {*OPTIONS[name]}:
        value = values.get(field, tmp_path / "no" if field in FILES else "de-en")
        with pytest.raises(ConfigError, match=f"not used by format {name}, which takes --") as caught:
            import_checkpoint(name, tmp_path, tmp_path / "run", ImportOptions(**{field: value}))
        flags = [word.rstrip(",:") for word in str(caught.value).split() if word.startswith("--")]
        assert len(flags) == 1 + len(OPTIONS[name]) and all(flag in shown for flag in flags)


def test_a_vocabulary_for_both_sides_beside_one_for_each(tmp_path: Path) -> None:
    files = {f"{side}vocab": import_cases.write_words(tmp_path / f"{side}words", 40) for side in ("", "src_", "tgt_")}
    with pytest.raises(ConfigError, match="--vocab is not used where --src-vocab and --tgt-vocab are both given"):
        import_checkpoint("annotated", tmp_path, tmp_path / "run", ImportOptions(**files))


@pytest.mark.parametrize(("kind", "option"), [("t5", "src_lang"), ("bart", "tgt_lang"), ("marian", "src_lang")])
def test_languages_of_a_folder_that_has_none(kind: str, option: str, tmp_path: Path) -> None:
    """A folder's reader is known by its type, before any file is read."""
    flag = option.replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{flag} de: not used by models of type {kind}"):
        hf_text.read_text(tmp_path, kind, ImportOptions(**{option: "de"}), {}, {})
