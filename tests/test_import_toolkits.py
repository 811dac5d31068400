"""Files as OpenNMT-py, fairseq, JoeyNMT, Sockeye and Marian write them, against plain models of the same tensors."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from torch import Tensor

from tformer_deploy.base.errors import ArtifactError, ConfigError, TformerError
from tformer_deploy.base.headers import POINTER
from tformer_deploy.importers import run
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.run import import_checkpoint, recognised
from tformer_deploy.importers.toolkit import parse_yaml, sines
from tformer_deploy.importers.weights import load_torch

from .params import long_but
from .plain_toolkits import POSITIONS, VOCAB, Fairseq, Joey, Marian, OpenNmt, Sockeye, Toolkit
from .plain_transformer import imported_as

KINDS: dict[str, type[Toolkit]] = {kind.format: kind for kind in (OpenNmt, Fairseq, Joey, Sockeye, Marian)}
CASES: dict[str, tuple[type[Toolkit], dict[str, Any]]] = {
    "opennmt-py": (OpenNmt, {"qkv_bias": False}),
    "opennmt-py concat": (OpenNmt, {"concat": True, "activation": "gelu"}),
    "opennmt-py gated rms": (OpenNmt, {"activation": "silu", "rms": True}),
    "fairseq": (Fairseq, {"pre": False, "tied": True}),
    "fairseq learned": (Fairseq, {"learned": True, "activation": "gelu", "cfg": True, "scale": False}),
    "fairseq embedding norm": (Fairseq, {"embedding_norm": True, "learned": True, "pre": False}),
    "joeynmt": (Joey, {"tied": True}),
    "joeynmt post": (Joey, {"pre": False, "scale": False, "activation": "swish"}),
    "sockeye": (Sockeye, {"tied": True}),
    "sockeye post glu": (Sockeye, {"pre": False, "glu": True, "activation": "swish1"}),
    "marian": (Marian, {"pre": False, "tied": True, "activation": "swish"}),
    "marian learned": (Marian, {"learned": True}),
    "marian ssru": (Marian, {"ssru": True}),
    "marian ssru post, binary": (Marian, {"ssru": True, "pre": False, "tied": True, "binary": True}),
    "marian ssru int8": (Marian, {"ssru": True, "pre": False, "tied": True, "int8": True}),
    "marian int8, nothing tied": (Marian, {"int8": True}),
}


@pytest.mark.parametrize(
    "case", long_but(list(CASES), "opennmt-py concat", "fairseq", "joeynmt", "sockeye", "marian", "marian ssru int8")
)
def test_equals_a_plain_model(case: str, tmp_path: Path) -> None:
    kind, how = CASES[case]
    made = kind(**how)
    path = made.write(tmp_path)
    assert recognised(path) == kind.format
    options = made.options(path)
    imported, _ = imported_as(kind.format, path, tmp_path / "run", made.encode, made.decode, options)
    ends = [] if kind is OpenNmt else [made.vocabulary.index("</s>")]
    unk = made.vocabulary.index("<unk>")
    assert imported.tokenizers.source_ids("w5 w9 nothing") == [5, 9, unk, *ends]
    assert imported.tokenizers.target_text([7, 8]) == "w7 w8"
    assert imported.config.share_embeddings == (
        "all" if how.get("tied") and kind is not Joey else "decoder" if how.get("tied") else "none"
    )
    assert any("split at spaces" in note for note in imported.notes)


NESTED: list[Any] = []
for _ in range(30):  # 10^30 values to whoever prints them all
    NESTED = [NESTED] * 10
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "shaw": ("opennmt-py", {"max_relative_positions": 20}, "max_relative_positions=20"),
    "rotary": ("opennmt-py", {"max_relative_positions": -1}, "max_relative_positions=-1"),
    "average": ("opennmt-py", {"self_attn_type": "average"}, "self_attn_type='average'"),
    "copy": ("opennmt-py", {"copy_attn": True}, "copy_attn=True"),
    "no positions": ("opennmt-py", {"position_encoding": False}, "position_encoding=False"),
    "lora": ("opennmt-py", {"lora_layers": ["w_1"]}, "lora_layers"),
    "shared keys": ("opennmt-py", {"num_kv": 2}, "num_kv=2"),
    "heads": ("opennmt-py", {"heads": "four"}, "heads='four' is no int"),
    "odd heads": ("opennmt-py", {"heads": 3}, "model.heads=3 does not divide"),
    "adaptive": ("fairseq", {"adaptive_softmax_cutoff": "10,20"}, "adaptive_softmax_cutoff='10,20'"),
    "cross": ("fairseq", {"cross_self_attention": True}, "cross_self_attention=True"),
    "a language elsewhere": ("fairseq", {"source_lang": "/../../x"}, "source_lang='/../../x' is no language"),
    "a nested value": ("fairseq", {"task": NESTED}, r"task=\[\["),
    "activation": ("fairseq", {"activation_fn": "tanh"}, "activation_fn=tanh"),
    "alpha": ("joeynmt", {"alpha": 0.5}, "alpha=0.5"),
    "recurrent": ("joeynmt", {"type": "recurrent"}, "type='recurrent'"),
    "ssru": ("sockeye", {"decoder_type": "ssru_transformer"}, "decoder_type='ssru_transformer'"),
    "lhuc": ("sockeye", {"use_lhuc": True}, "use_lhuc=True"),
    "sequence": ("sockeye", {"preprocess_sequence": "nn"}, "preprocess_sequence"),
    "rnn": ("marian", {"transformer-decoder-autoreg": "rnn", "dec-cell": "gru"}, "dec-cell='gru'"),
    "projected": (
        "marian",
        {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru", "transformer-rnn-projection": True},
        "transformer-rnn-projection=True",
    ),
    "aan": ("marian", {"transformer-decoder-autoreg": "average-attention"}, "autoreg='average-attention'"),
    "depth": ("marian", {"transformer-ffn-depth": 3}, "transformer-ffn-depth=3"),
    "highway": ("marian", {"transformer-postprocess": "dhn"}, "postprocess"),
    "s2s": ("marian", {"type": "s2s"}, "type='s2s'"),
    "no depth": ("marian", {"enc-depth": None}, "has no enc-depth"),
    "right to left": ("marian", {"right-left": True}, "right-left=True"),
    "classes": ("marian", {"input-types": ["class", "sequence"]}, "input-types=.'class', 'sequence'."),
    "two sources": ("marian", {"input-types": ["sequence"] * 3}, "input-types="),
    "factors": ("marian", {"lemma-dependency": "re-embedding"}, "lemma-dependency='re-embedding'"),
    "concat": ("marian", {"factors-combine": "concat"}, "factors-combine='concat'"),
    "alibi": ("marian", {"transformer-attention-mask": "alibi"}, "attention-mask='alibi'"),
    "unknown": ("marian", {"transformer-strange": True}, "transformer-strange=True"),
    "no bias": ("marian", {"output-omit-bias": True}, "does not know: decoder_ff_logit_out_b"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, settings, message = REFUSED[case]
    made = KINDS[name](opt=settings)
    refused(made, made.write(tmp_path), tmp_path / "run", message)


@pytest.mark.parametrize("texts", [False, True])
def test_deeply_nested_yaml_is_damaged(texts: bool) -> None:
    """The fast loader's recursion has no limit but the stack's."""
    for text in ("[" * 200_000, "- " * 101 + "a", "{a: " * 101):
        with pytest.raises(ArtifactError, match="x is damaged: it is nested more than 100 deep"):
            parse_yaml(text, "x", texts)
    assert parse_yaml("{a: [b, {c: d}]}", "x", texts) == {"a": ["b", {"c": "d"}]}


PARTS: dict[str, tuple[type[Toolkit], str, Any, str]] = {
    "opt": (OpenNmt, "opt", [1], r"opt holds a list, not options by their names"),
    "vocab": (OpenNmt, "vocab", 3, r"vocab holds a int, not options"),
    "words": (OpenNmt, "vocab", {"src": [[]], "tgt": ["a"]}, "has no lists of words"),
    "model": (OpenNmt, "model", "a", "holds a str, not a state dict"),
    "generator": (OpenNmt, "generator", {"weight": 1}, "holds no tensors"),
    "args": (Fairseq, "args", "a", "args holds a str, not options"),
    "task": (Fairseq, "cfg", {"model": {"a": 1}, "task": 3}, "cfg.task holds a int"),
    "tensors": (Fairseq, "model", {"a": 1}, "holds no tensors"),
    "model_state": (Joey, "model_state", {"a": None}, "holds no tensors"),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_of_another_kind_are_named(case: str, tmp_path: Path) -> None:
    kind, part, value, message = PARTS[case]
    made = kind()
    path = made.write(tmp_path)
    parts = load_torch(path)
    path.unlink()  # it is mapped
    torch.save({**parts, part: value, **({"args": None} if part == "cfg" else {})}, path)
    refused(made, path, tmp_path / "run", message)


def test_settings_that_marian_saves_of_every_model(tmp_path: Path) -> None:
    """Its defaults; null is what nobody set."""
    off = (
        "right-left",
        "skip",
        "ulr",
        "output-omit-bias",
        "transformer-pool",
        "transformer-no-bias",
        "layer-normalization",
    )
    rnn = {"dim-rnn": 1024, "enc-type": "bidirectional", "enc-cell": "gru", "dec-cell": "gru", "enc-cell-depth": 1}
    more = {
        **dict.fromkeys(off, False),
        **rnn,
        "dec-cell-base-depth": 2,
        "dec-cell-high-depth": 1,
        "dim-emb": 16,
        "input-types": ["sequence", "alignment", "sequence"],
        "special-vocab": [],
        "tied-embeddings-all": True,
        "transformer-dim-ffn": 24,
        "transformer-dim-aan": 2048,
        "transformer-aan-depth": 2,
        "transformer-aan-activation": "swish",
        "transformer-tied-layers": [],
        "transformer-guided-alignment-layer": "last",
        "transformer-train-position-embeddings": False,
        "transformer-attention-mask": "default",
        "bert-train-type-embeddings": True,
        "bert-type-vocab-size": 2,
        "ulr-dim-emb": None,
        "lemma-dim-emb": 0,
        "lemma-dependency": None,
        "factors-combine": "sum",
        "factors-dim-emb": None,
        "separator-symbol": "[eos]",
    }
    made = Marian(tied=True, opt=more)
    path = made.write(tmp_path)
    import_checkpoint("marian", path, tmp_path / "run", made.options(path))
    made = Marian(tied=True, opt={**more, "output-omit-bias": True})
    del made.t["decoder_ff_logit_out_b"]
    made.write(tmp_path)
    import_checkpoint("marian", path, tmp_path / "run2", made.options(path))


def refused(made: Toolkit, path: Path, out: Path, message: str) -> None:
    with pytest.raises(TformerError, match=message) as caught:
        import_checkpoint(made.format, path, out, made.options(path), comparing=False)
    assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize("name", KINDS)
def test_wrong_tensors(name: str, tmp_path: Path) -> None:
    """One that is missing, one too many, one of another shape, one with what is no number."""
    made = KINDS[name]()
    bias = next(
        key
        for key in made.t
        if "encoder" in key and key.endswith(("fc1.bias", "w_1.bias", "ff1.bias", "layer.0.bias", "ffn_b1"))
    )
    whole = dict(made.t)
    changes: dict[str, Tensor | None] = {
        "no tensor|has nothing": None,
        "would be": torch.zeros(whole[bias].numel() + 1),
        "NaN or infinite values": torch.full_like(whole[bias], math.nan),
    }
    if name in ("opennmt-py", "fairseq", "joeynmt", "sockeye"):
        del changes["no tensor|has nothing"]  # a missing bias is one of zeros; weights are below
    for message, tensor in changes.items():
        made.t[bias] = tensor  # type: ignore[assignment]
        if tensor is None:
            del made.t[bias]
        refused(made, made.write(tmp_path), tmp_path / "run", message)
        made.t[bias] = whole[bias]
    made.t["encoder.strange.weight"] = torch.zeros(3)
    refused(made, made.write(tmp_path), tmp_path / "run", "does not know: encoder.strange.weight")
    del made.t["encoder.strange.weight"]
    last = next(
        key
        for key in reversed(made.t)
        if key.endswith(("fc2.weight", "w_2.weight", "ff2.weight", "layer.3.weight", "ffn_W2"))
    )
    del made.t[last]
    refused(made, made.write(tmp_path), tmp_path / "run", "has no tensor")


def test_words_must_fit(tmp_path: Path) -> None:
    for name, kind in KINDS.items():
        made = kind()
        folder = tmp_path / name
        folder.mkdir()
        made.vocabulary = made.vocabulary[:-1]
        if name in ("opennmt-py", "sockeye"):  # which pad vocabularies; a tokenizer may have fewer entries
            made.vocabulary = [*made.vocabulary, "w39", "w40"]
        refused(made, made.write(folder), tmp_path / "run", "entries")


def test_codes_split_words(tmp_path: Path) -> None:
    made = Fairseq()
    made.vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "lo@@", "w", "l@@", "o@@", *(f"w{i}" for i in range(8, VOCAB))]
    path = made.write(tmp_path)
    (tmp_path / "codes").write_text("#version: 0.2\nl o 12\nw 9</w> 3\n")
    options = ImportOptions(src_codes=tmp_path / "codes", model={"max_positions": POSITIONS})
    imported, _ = import_checkpoint("fairseq", path, tmp_path / "run", options)
    assert imported.tokenizers.source_ids("low") == [4, 5, 2]
    assert imported.tokenizers.target_text([4, 5, 9]) == "low w9"
    assert not any("split at spaces" in note for note in imported.notes)
    (tmp_path / "codes").write_text("l o\n")
    with pytest.raises(TformerError, match=r"BPE codes with #version: 0\.2: if fastBPE wrote it, put that line first"):
        import_checkpoint("fairseq", path, tmp_path / "run2", options)


@pytest.mark.parametrize("name", KINDS)
def test_codes_do_not_lower_case(name: str, tmp_path: Path) -> None:
    made = KINDS[name]()
    path = made.write(tmp_path)
    (tmp_path / "codes").write_text("#version: 0.2\nl o\n")
    options = replace(made.options(path), src_codes=tmp_path / "codes", lower=True)
    if name == "joeynmt":  # its config.yaml says it of both sides
        options = replace(options, lower=False)
    message = "lowercase=True .* lower-case text before" if name == "joeynmt" else "--lower: .* lower-case text before"
    with pytest.raises(ConfigError, match=message):
        import_checkpoint(name, path, tmp_path / "run", options)
    words = replace(options, src_codes=None, lower=True)
    imported, _ = import_checkpoint(name, path, tmp_path / "run", words)
    assert imported.tokenizers.source_ids("W5") == imported.tokenizers.source_ids("w5")


def test_sentencepiece_vocabularies(tmp_path: Path) -> None:
    """Of Marian, whose ids are the model's, and of fairseq, whose ids are a dictionary's of its pieces."""
    lines = ["low lower lowest", "new newer newest", "wide wider widest"] * 4
    specials = "--bos_id=-1 --pad_id=-1 --eos_id=0 --unk_id=1"
    training = f"--model_type=bpe --vocab_size={VOCAB} --minloglevel=2 {specials}"
    (tmp_path / "text").write_text("\n".join(lines))
    SentencePieceTrainer.Train(f"--input={tmp_path / 'text'} --model_prefix={tmp_path / 'spm'} {training}")
    (tmp_path / "spm.model").rename(tmp_path / "vocab.spm")
    own = SentencePieceProcessor(model_file=str(tmp_path / "vocab.spm"))
    made = Marian()
    path = made.write(tmp_path)
    options = ImportOptions(vocab=tmp_path / "vocab.spm", model={"max_positions": POSITIONS})
    imported, _ = import_checkpoint("marian", path, tmp_path / "run", options)
    for line in lines[:3]:
        assert imported.tokenizers.source_ids(line) == [*own.encode(line), 0]
        assert imported.tokenizers.target_text(own.encode(line)) == line
    with pytest.raises(ConfigError, match=r"--lower: .*vocab.spm splits text as it is"):
        import_checkpoint("marian", path, tmp_path / "run2", replace(options, lower=True))
    pieces = [own.id_to_piece(i) for i in range(VOCAB)]
    other = Fairseq()
    known = dict.fromkeys([*reversed(own.encode_as_pieces("newest")), *pieces])
    other.vocabulary = [*Fairseq.words, *(piece for piece in known if piece not in Fairseq.words)][:VOCAB]
    file = other.write(tmp_path)
    codes = ImportOptions(src_codes=tmp_path / "vocab.spm", model={"max_positions": POSITIONS})
    second, _ = import_checkpoint("fairseq", file, tmp_path / "run2", codes)
    (tmp_path / "vocab.spm").write_bytes(b"\0damaged")
    for kind, source, given in (("marian", path, options), ("fairseq", file, codes)):
        with pytest.raises(ArtifactError, match=r"vocab.spm: the sentencepiece model is damaged: .*: copy it again"):
            import_checkpoint(kind, source, tmp_path / "run3", given)
    (tmp_path / "vocab.spm").write_bytes(POINTER + b"v1\n")
    with pytest.raises(ArtifactError, match=r"vocab.spm is a pointer of Git LFS, not the file: run git lfs pull"):
        import_checkpoint("marian", path, tmp_path / "run3", options)
    ids = second.tokenizers.source_ids("newest")
    assert [other.vocabulary[i] for i in ids] == [*own.encode_as_pieces("newest"), "</s>"]
    assert second.tokenizers.target_text(ids[:-1]) == "newest"


def test_a_width_without_wavelengths_is_said_in_a_line(tmp_path: Path) -> None:
    said = r"is not as marian is known \(ZeroDivisionError: "
    with pytest.raises(ArtifactError, match=said), run._understood(tmp_path, "marian"):
        sines(0, POSITIONS, 2)


def test_binaries_of_marian_that_are_damaged_or_of_one_processor(tmp_path: Path) -> None:
    made = Marian(ssru=True, pre=False, tied=True, int8=True)
    path = made.write(tmp_path)
    whole = path.read_bytes()
    heads = 16 + 32 * int.from_bytes(whole[8:16], "little")
    for size in (heads // 2, heads, heads + 90, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(made, path, tmp_path / "run", "is damaged: .*: copy it again")
    path.write_bytes(whole.replace((0x4101).to_bytes(8, "little"), (0x5101).to_bytes(8, "little")))
    refused(made, path, tmp_path / "run", r"is of Marian's type 0x5101, .*: convert the \.npz with marian-conv")
    factor = np.float32(made.factors["Wemb"]).tobytes()
    path.write_bytes(whole.replace(factor, np.float32(0).tobytes()))
    refused(made, path, tmp_path / "run", "tensor 'Wemb' is no matrix with a factor above 0")


def test_each_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another format's reader refuses the file."""
    modules = {name: f"tformer_deploy.importers.{name.replace('-', '_')}" for name in run.FORMATS}
    monkeypatch.setattr(run, "FORMATS", {name: run.FORMATS[name] for name in modules if find_spec(modules[name])})
    for name, kind in KINDS.items():
        folder = tmp_path / name
        folder.mkdir()
        assert run.recognised(kind().write(folder)) == name
    torch.save({"extra": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(TformerError, match="would execute"):
        run.recognised(tmp_path / "evil.pt")


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_yaml_that_means_gigabytes_is_refused(tmp_path: Path) -> None:
    made = Sockeye()
    made.write(tmp_path)
    head, config = (tmp_path / "config").read_text().split("\n", 1)
    again = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    nested = "\n".join(["a0: &a0 [1, 2]", *again, ""])
    (tmp_path / "config").write_text(f"{head}\n{nested}{config}dtype: *a29\n")
    refused(made, tmp_path, tmp_path / "run", r"dtype=\[.* is not supported")
    merged = nested.replace("[1, 2]", "{x: 1}").replace("[", "{<<: [").replace("]", "]}")
    (tmp_path / "config").write_text(f"{head}\n{merged}{config}")
    refused(made, tmp_path, tmp_path / "run", "it merges mappings with <<, which is not read")


def test_nothing_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("opennmt-py", "fairseq", "joeynmt", "sockeye"):
        made = KINDS[name]()
        folder = tmp_path / name
        folder.mkdir()
        path = made.write(folder)
        file = path / "params.best" if path.is_dir() else path
        torch.save({**torch.load(file, weights_only=False), "extra": Evil()}, file)
        refused(made, path, tmp_path / "run", "would execute")
    made = Sockeye()
    folder = tmp_path / "yaml"
    folder.mkdir()
    made.write(folder)
    text = (folder / "config").read_text()
    (folder / "config").write_text(text + "more: !!python/object/apply:builtins.print ['executed']\n")
    import_checkpoint("sockeye", folder, tmp_path / "run", made.options(folder))
    assert "executed" not in capsys.readouterr().out


def test_torchtext_vocabularies_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions keep objects of a package that is gone."""
    field = type("Field", (), {"__module__": "torchtext.data.field"})
    for name in ("torchtext", "torchtext.data", "torchtext.data.field"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["torchtext.data.field"], "Field", field, raising=False)
    path = tmp_path / "old.pt"
    torch.save({"model": {}, "generator": {}, "opt": Namespace(), "vocab": field()}, path)
    refused(OpenNmt(), path, tmp_path / "run", "convertv2_v3")
