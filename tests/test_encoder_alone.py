"""Modules without a decoder: exported, checked and encoded; what needs a decoder refuses their bundles in one line."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import tformer_deploy
from tformer_deploy import UserModel
from tformer_deploy.base.errors import ConfigError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.check import Gate, make_corpus
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.model.modules.probe import wrapped
from tformer_deploy.translate.encode import EncoderOptions, TextEncoder

from .command import failed_line, printed, run_here
from .cpp_library import built
from .mutations import break_graph
from .test_encode import no_mask, shifted
from .user_models import PAD, POSITIONS, START, VOCAB, D, varied

EOS, CLS, SEP = 4, 5, 6
Give = dict[str, Any]
ENCODER: Give = {"src_vocab": VOCAB, "max_positions": POSITIONS, "pad_id": PAD}


class Stack(nn.Module):
    """`nn.TransformerEncoder` over embeddings and positions, and a mask that hides nothing, as tutorials have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(POSITIONS, D)
        layer = nn.TransformerEncoderLayer(D, 4, 24, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        hides = torch.zeros(ids.shape[1], ids.shape[1], dtype=torch.bool)
        return self.layers(x, hides, padding)  # type: ignore[no-any-return]


def stack(**changes: Any) -> UserModel:
    torch.manual_seed(1)
    given: Give = {**ENCODER, "eos_id": EOS, "encode": lambda m, src, mask: m(src, ~mask)}
    return UserModel(**{"module": varied(Stack()), **given, **changes})


def bert() -> UserModel:
    """Sentences of CLS, words and SEP."""
    torch.manual_seed(2)
    sizes = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = BertConfig(vocab_size=VOCAB, max_position_embeddings=POSITIONS, pad_token_id=PAD, **sizes)  # type: ignore[arg-type]
    return UserModel(
        varied(BertModel(config, add_pooling_layer=False)),
        **ENCODER,
        source_prefix=(CLS,),
        source_suffix=(SEP,),
        encode=lambda m, src, mask: m(input_ids=src, attention_mask=mask.long()).last_hidden_state,
    )


ENCODERS: dict[str, Callable[[], UserModel]] = {"stack": stack, "bert": bert}


def write(folder: Path, name: str) -> str:
    """`FILE.py:FUNCTION` of one of ENCODERS."""
    path = folder / "my_file.py"
    path.write_text(
        f"from tests.test_encoder_alone import ENCODERS\n\n\ndef make():\n    return ENCODERS[{name!r}]()\n"
    )
    return f"{path}:make"


def exported(folder: Path, name: str, *options: object) -> Path:
    done = run_here("export", write(folder, name), "--out", folder / "bundle", *options)
    assert printed(done)[-2:] == ["passed", f"{folder}/bundle: bundle written"]
    assert done.stderr.decode().splitlines() == [f"running {folder}/my_file.py"] * 2
    return folder / "bundle"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `stack`. Read only."""
    return exported(tmp_path_factory.mktemp("encoder"), "stack")


def plain(name: str, ids: list[int]) -> np.ndarray:
    """The module's own vectors of one sentence."""
    user = ENCODERS[name]()
    src = torch.tensor([ids])
    with torch.inference_mode():
        if isinstance(user.module, BertModel):  # transformers' own words
            return user.module.eval()(input_ids=src).last_hidden_state[0].numpy()  # type: ignore[no-any-return]
        return user.module.eval()(src, torch.zeros_like(src, dtype=torch.bool))[0].numpy()  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize(("name", "ids"), [("stack", [7, 9, 11, EOS]), ("bert", [CLS, 7, 9, 11, SEP])])
def test_vectors_are_the_modules_own(name: str, ids: list[int], tmp_path: Path) -> None:
    folder = exported(tmp_path, name, "--memory")
    for options in ({}, {"backend": "eager", "checkpoint": tmp_path / "my_file.py:make"}):
        with TextEncoder(EncoderOptions(folder, pool="none", **options)) as encoder:  # type: ignore[arg-type]
            first, empty, other = encoder.encode(["w7 w9 w11", "", "w8"])
        assert first.ids == ids and not empty.ids and other.ids == [*ids[: -len(ids[ids.index(7) :])], 8, ids[-1]]
        for found in (first, other):
            expected = plain(name, found.ids)
            assert found.vectors.shape == expected.shape and np.abs(found.vectors - expected).max() < 1e-4
    assert sorted(path.name for path in folder.glob("*.onnx")) == ["memory.onnx"]
    done = run_here("check", folder, "--checkpoint", tmp_path / "my_file.py:make", "--html", tmp_path / "check.html")
    lines = printed(done)
    assert lines[0].endswith("sentences, for an encoder alone") and lines[-1] == "passed"
    assert any(line.startswith("  constants") and "0 differ" not in line for line in lines)
    assert "memory" in (tmp_path / "check.html").read_text()
    shown = printed(run_here("inspect", folder))
    assert any(line.startswith("  model      an encoder of ") for line in shown) and "  encode     fp32" in shown


@pytest.mark.long
@pytest.mark.parametrize(
    "verb",
    [
        ("translate",),
        ("translate", "--backend", "cpp"),
        ("translate", "--backend", "native"),
        ("translate", "--backend", "trt"),
        ("translate", "--backend", "eager"),
        ("score", "--src", "LINES", "--tgt", "LINES"),
        ("corpus", "--in", "LINES", "--out", "OUT"),
        ("bench",),
        ("shortlist", "--src", "LINES", "--tgt", "LINES"),
        ("build", "--src", "LINES"),
    ],
    ids=" ".join,
)
def test_what_needs_a_decoder_says_so(verb: tuple[str, ...], bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("w7 w8\nw9\n")
    name, *options = [each.replace("LINES", f"{tmp_path}/lines").replace("OUT", f"{tmp_path}/out") for each in verb]
    line = failed_line(run_here(name, bundle, *options, stdin=b"w7\n"))
    assert line == f"error: {bundle} has an encoder and no decoder: use tformer encode"
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_so_do_python_and_cpp(bundle: Path) -> None:
    said = f"{bundle} has an encoder and no decoder: use tformer encode"
    with pytest.raises(ConfigError, match=re.escape(said)):
        tformer_deploy.load(bundle)
    done = subprocess.run(
        [built() / "examples" / "tformer-cpp", "translate", bundle], input=b"w7\n", capture_output=True
    )
    assert (done.returncode, done.stderr.decode()) == (1, f"error: {said}\n")


@pytest.mark.long
@pytest.mark.parametrize(
    ("verb", "said"),
    [
        (("encode", "BUNDLE", "--backend", "native"), "has an encoder alone, for ort and eager: leave out --backend"),
        (
            ("check", "BUNDLE", "--beams", "3"),
            "--beams: BUNDLE has an encoder and no decoder, whose output is compared",
        ),
        (("check", "BUNDLE", "--save-reference", "OUT"), "--save-reference: BUNDLE has an encoder and no decoder"),
        (
            ("export", "MAKE", "--out", "OUT", "--recipe", "int8"),
            "recipe int8: MAKE is an encoder alone, for recipe fp32",
        ),
        (
            ("export", "MAKE", "--out", "OUT", "--tgt", "LINES"),
            "--tgt: MAKE is an encoder alone, which translates nothing",
        ),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_what_nothing_would_read_is_refused(verb: tuple[str, ...], said: str, bundle: Path, tmp_path: Path) -> None:
    places = {"BUNDLE": bundle, "MAKE": bundle.parent / "my_file.py:make", "OUT": tmp_path / "out", "LINES": __file__}
    for name, path in places.items():
        verb, said = tuple(each.replace(name, str(path)) for each in verb), said.replace(name, str(path))
    done = run_here(*verb, stdin=b"w7\n")
    assert done.returncode == 1 and said in done.stderr.decode().splitlines()[-1] and not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize("mutate", [no_mask, shifted])
def test_a_wrong_graph_fails(mutate: Any, bundle: Path, tmp_path: Path) -> None:
    broken = open_bundle(break_graph(bundle, tmp_path / "broken", "memory", mutate))
    gate = Gate(broken, bundle.parent / "my_file.py:make", threads=1)
    report = gate.run(["ort"], gate.reference(make_corpus(broken.config, broken.recipe, broken.tokenizers(), None)))
    assert len(report.failures) == 1 and report.failures[0].startswith("ort: memory of sentence ")


@pytest.mark.long
def test_a_module_that_cannot_be_copied_has_no_known_rounding(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: EagerEngine) -> EagerEngine:
        raise TypeError("cannot pickle '_io.TextIOWrapper' object")

    monkeypatch.setattr(EagerEngine, "in_double", refuse)
    opened = open_bundle(bundle)
    gate = Gate(opened, bundle.parent / "my_file.py:make", threads=1)
    reference = gate.reference(make_corpus(opened.config, opened.recipe, opened.tokenizers(), None))
    assert "cannot pickle" in gate.rounding(reference).unknown


WRONG: dict[str, Give] = {
    "UserModel(start_id=...): leave it out beside encode alone, or give decode as well": {"start_id": START},
    "UserModel(tgt_vocab=...): leave it out beside encode alone": {"tgt_vocab": VOCAB},
    "UserModel(decoding=...): leave it out beside encode alone": {"decoding": {"beams": 2}},
    "UserModel(layers=...): leave it out beside encode alone": {"layers": "layers", "self_attention": "self_attn"},
    "UserModel(eos_id=-1): give the token's id": {"eos_id": -1},
    "UserModel(src_vocab=0): must be a whole number of at least 1": {"src_vocab": 0},
    "here: encode returned int64 (3, 5), where memory (B, S, d) is (3, 5, d)": {"encode": lambda m, src, mask: src},
    "here: a sentence's vectors change by": {"encode": lambda m, src, mask: m(src, mask & False)},
    "here: the same ids have other scores the second time": {"encode": lambda m, s, mask: m(s, ~mask).bernoulli_(0.5)},
    "here: encode returned what is no number": {"encode": lambda m, src, mask: m(src, ~mask) / 0},
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_is_said_in_a_line(said: str) -> None:
    with pytest.raises(ConfigError) as found:
        wrapped(stack(**WRONG[said]), "here")
    assert said in str(found.value)


def test_eos_may_be_left_out_beside_a_suffix() -> None:
    config = wrapped(bert(), "here").config
    assert (config.eos_id, config.bos_id, config.decoder_layers) == (SEP, CLS, 0)


def test_what_only_a_decoder_reads_is_no_constant_of_it() -> None:
    user = stack()
    user.module.decoder = nn.Linear(D, VOCAB)
    assert wrapped(user, "here").unread == {"module.decoder.weight", "module.decoder.bias"}  # type: ignore[attr-defined]
