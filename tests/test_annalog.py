"""A trained model of somebody else, end to end: the PyPI package annalog, molecules to molecules as SMILES."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.decoding import DecodeOptions, decode
from tformer_deploy.engines import make_engine
from tformer_deploy.export.checked import Texts, export_checked
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.run import import_checkpoint
from tformer_deploy.model.checkpoint import open_checkpoint
from tformer_deploy.translate.translator import Translator

from .command import run_here
from .plain_decoding import make_batch
from .plain_models import PrefixEngine

PACKAGE = Path(__file__).parent.parent / ".demo" / "annalog" / "annalog"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PACKAGE.is_dir(), reason="annalog is not there: make .demo/annalog"),
]
REGEX = r"\[[^\]]*\]|%\d\d|Br|Cl|."
SIDES = ("C", "CC", "O", "OC", "N", "F", "Cl", "Br", "C#N", "C(=O)O", "C(N)=O", "S(N)(=O)=O", "C(F)(F)F")
KNOWN = (
    "CC(=O)Oc1ccccc1C(=O)O",
    "Cn1cnc2c1c(=O)n(C)c(=O)n2C",
    "CC(C)Cc1ccc(cc1)C(C)C(=O)O",
    "CC(=O)Nc1ccc(O)cc1",
    "CN1CCC[C@H]1c1cccnc1",
    "OC(=O)c1ccccc1O",
    "NCCc1ccc(O)c(O)c1",
    "CC(N)Cc1ccccc1",
    "O=C(O)Cc1ccccc1Nc1c(Cl)cccc1Cl",
    "CN(C)CCc1c[nH]c2ccccc12",
    "C[C@H](N)C(=O)O",
    "NC(=O)c1cccnc1",
    "Clc1ccc(cc1)C(c1ccccc1)N1CCNCC1",
    "CCN(CC)CCOC(=O)c1ccc(N)cc1",
    "CC(C)NCC(O)COc1cccc2ccccc12",
    "CC1=CC(=O)CC(C)(C)C1",
    "OCC(O)CO",
    "c1ccc2ccccc2c1",
    "c1ccc(cc1)-c1ccccc1",
    "O=C1CCCCCN1",
    "CC(C)(C)NCC(O)c1ccc(O)c(CO)c1",
    "CS(=O)(=O)Nc1ccc([N+](=O)[O-])cc1",
    "C1CCNCC1",
    "O=C1NC(=O)C(c2ccccc2)(c2ccccc2)N1",
)
MOLECULES = [*KNOWN, *(f"{a}c1ccc({b})cc1" for a, b in product(SIDES, SIDES)), *(f"{a}c1ccccn1" for a in SIDES)][:200]


@pytest.fixture(scope="module")
def package() -> Iterator[ModuleType]:
    """Its own model's code; the package's first file needs chemistry packages, which the model does not."""
    parent = ModuleType("annalog")
    parent.__path__ = [str(PACKAGE)]
    sys.modules["annalog"] = parent
    yield importlib.import_module("annalog.model_files")
    for name in [name for name in sys.modules if name.split(".")[0] == "annalog"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def original(package: Any) -> Any:
    sizes = (59, 256, 3, 8, 512, 0.1, "cpu", 102)
    model = package.Seq2Seq(package.Encoder(*sizes), package.Decoder(*sizes), 1, 1, "cpu")
    model.load_state_dict(torch.load(PACKAGE / "ckpt_and_vocab" / "Lev_extended.pt", "cpu", weights_only=True))
    return model.eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("annalog") / "run"
    files = PACKAGE / "ckpt_and_vocab"
    options = ImportOptions(files / "stereo_experiment_vocab_ttf.pkl", heads=8, split_regex=REGEX)
    import_checkpoint("pytorch-seq2seq", files / "Lev_extended.pt", out, options)
    return out


@pytest.fixture(scope="module")
def bundle(run: Path) -> Path:
    """Checked on molecules. In 8 bits too, with the layers in fp32 whose rounding harms most."""
    out = run.parent / "bundle"
    texts = Texts(Path(__file__).parent / "molecules.txt")
    report = export_checked(run, out, ["fp32", "fp32-cpu", "int8", "trt"], texts)
    assert report.passed and not any(engine.loosened for engine in report.engines)
    return out


def scores_of(original: Any) -> Any:
    def log_probs(src: Tensor, lengths: Tensor, tgt: Tensor) -> Tensor:
        src = src.masked_fill(torch.arange(src.shape[1]) >= lengths[:, None], 1)
        return torch.log_softmax(original(src, tgt)[0], -1)

    return log_probs


def engine_of(original: Any, config: Any) -> PrefixEngine:
    def decoded(memory: Tensor, lengths: Tensor, tgt: Tensor) -> Tensor:
        mask = (torch.arange(memory.shape[1]) < lengths[:, None])[:, None, None]
        return torch.log_softmax(original.decoder(tgt, memory, original.make_trg_mask(tgt), mask)[0], -1)

    def encoded(src: Tensor, lengths: Tensor) -> Tensor:
        return original.encoder(src, (torch.arange(src.shape[1]) < lengths[:, None])[:, None, None])  # type: ignore[no-any-return]

    return PrefixEngine(config, encoded, decoded, 102)


EXPECTED: dict[str, list[list[list[int]]]] = {}
"""Of each search, what the package's model gives: the slow part, once."""


def test_molecules_are_split_as_the_package_splits_them(package: Any, run: Path) -> None:
    tokenizers, theirs = open_checkpoint(run).tokenizers, package.SMILESTokenizer()
    for molecule in MOLECULES:
        words = ["<sos>", *theirs.tokenize(molecule), "<eos>"]
        assert tokenizers.source.pieces(tokenizers.source_ids(molecule)) == words
        assert tokenizers.target_text(tokenizers.target_ids(molecule)) == molecule
    assert len(set(MOLECULES)) == 200


def test_log_probabilities_are_the_packages(original: Any, run: Path) -> None:
    checkpoint = open_checkpoint(run)
    model, tokenizers = checkpoint.load_model(), checkpoint.tokenizers
    for begin in range(0, 200, 50):
        batch = make_batch([tokenizers.source_ids(molecule) for molecule in MOLECULES[begin : begin + 50]])
        src, lengths = torch.from_numpy(batch.src_ids).long(), torch.from_numpy(batch.src_lengths)
        targets = src.roll(1, 0)  # of the molecule before
        with torch.inference_mode():
            ours = model(src, lengths, targets).log_softmax(-1)
            theirs = scores_of(original)(src, lengths, targets)
        real = torch.arange(src.shape[1]) < lengths.roll(1)[:, None]
        assert (ours - theirs)[real].abs().max() < 1e-4


@pytest.mark.parametrize(
    "options",
    [{}, {"beams": 5, "n_best": 5}, {"sampling": True, "n_best": 2, "seed": 11, "temperature": 1.2}],
    ids=["greedy", "beam", "sampled"],
)
@pytest.mark.parametrize("variant", ["", "fp32-cpu", "trt"])
def test_tokens_are_the_packages(original: Any, bundle: Path, options: dict[str, Any], variant: str) -> None:
    """Of 200 molecules greedily, of 25 with five beams and sampled; their model runs the whole prefix at each step."""
    opened = open_bundle(bundle)
    molecules = MOLECULES[::8] if options else MOLECULES
    sources = [opened.tokenizers().source_ids(molecule) for molecule in molecules]
    chosen = DecodeOptions(max_tokens=40, **options)
    with engine_of(original, opened.config) as theirs:
        if (key := str(options)) not in EXPECTED:
            found = decode(theirs, make_batch(sources), chosen)  # type: ignore[arg-type]
            EXPECTED[key] = [[output.ids for output in each] for each in found]
    with make_engine(f"ort:{variant}" if variant else "ort", opened, None, 1) as engine:
        results = Translator(engine, opened.tokenizers(), chosen).open().generate(sources)
    ours = [[each.ids for each in (result, *result.alternatives)] for result in results]
    assert ours == EXPECTED[key]
    assert len({tuple(ids[0]) for ids in ours}) > len(sources) // 2


OWN_FILE = """
import sys
from pathlib import Path
from types import ModuleType

import torch

import tformer_deploy
from tformer_deploy.importers.vocabularies import read_entries
from tformer_deploy.bundle.text import Specials, Words

PACKAGE = Path({package!r})
parent = sys.modules["annalog"] = ModuleType("annalog")
parent.__path__ = [str(PACKAGE)]
from annalog.model_files import Decoder, Encoder, Seq2Seq


def make():
    sizes = (59, 256, 3, 8, 512, 0.1, "cpu", 102)
    model = Seq2Seq(Encoder(*sizes), Decoder(*sizes), 1, 1, "cpu")
    files = PACKAGE / "ckpt_and_vocab"
    model.load_state_dict(torch.load(files / "Lev_extended.pt", "cpu", weights_only=True))
    words = read_entries(files / "stereo_experiment_vocab_ttf.pkl")
    split = Words(words, None, Specials(1, 2, 3, 0), regex={regex!r})
    return tformer_deploy.UserModel(
        model,
        src_vocab=59,
        tgt_vocab=59,
        max_positions=102,
        pad_id=1,
        start_id=2,
        eos_id=3,
        encode=lambda m, src_ids, mask: m.encoder(src_ids, mask[:, None, None]),
        decode=lambda m, memory, mask, ids: m.decoder(ids, memory, m.make_trg_mask(ids), mask[:, None, None])[0],
        layers="decoder.layers",
        self_attention="self_attention",
        source=split,
        target=split,
        source_prefix=(2,),
    )
"""


def test_8_bits_keep_what_rounding_harms_in_fp32(bundle: Path) -> None:
    """Some layers, which `inspect` names; the gate has compared scores, entries and best tokens with its own limits."""
    kept = open_bundle(bundle).manifest["variants"]["int8"]["fp32"]
    assert 5 < len(kept) < 30 and "output" not in kept
    done = run_here("inspect", bundle)
    assert done.returncode == 0 and f"in fp32: {', '.join(kept)}" in done.stdout.decode()


def test_a_stranger_exports_the_module_itself(original: Any, tmp_path: Path) -> None:
    """Without the importer: the package's own code, called from a file, with hooks on its decoder's layers."""
    (tmp_path / "mine.py").write_text(OWN_FILE.format(package=str(PACKAGE), regex=REGEX), encoding="utf-8")
    text = tmp_path / "molecules"
    text.write_text("\n".join(KNOWN[:8]) + "\n", encoding="utf-8")
    done = run_here("export", f"{tmp_path / 'mine.py'}:make", "--out", tmp_path / "bundle", "--src", text)
    assert done.returncode == 0, done.stderr
    opened = open_bundle(tmp_path / "bundle")
    sources = [opened.tokenizers().source_ids(molecule) for molecule in KNOWN]
    chosen = DecodeOptions(max_tokens=40, beams=3, n_best=3)
    with engine_of(original, opened.config) as theirs, make_engine("ort", opened, None, 1) as ours:
        outputs = [decode(engine, make_batch(sources), chosen) for engine in (theirs, ours)]  # type: ignore[arg-type]
    found = [[[output.ids for output in each] for each in engine] for engine in outputs]
    assert found[0] == found[1]
