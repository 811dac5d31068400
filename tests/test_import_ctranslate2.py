"""CTranslate2 folders, written here from the description of their format, against a plain model of the same tensors.

Where the ctranslate2 package is installed, it runs the same folders.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tformer_deploy.base.errors import TformerError
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.run import import_checkpoint, recognised

from .params import long_but
from .plain_transformer import Random, attend, imported_as, layer_norm, rms_norm

VOCAB, WIDTH, FF, HEADS, POSITIONS = 40, 16, 24, 4, 10
WORDS = ["<unk>", "<s>", "</s>", "<blank>", *(f"w{i}" for i in range(4, VOCAB))]
TYPES = [torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16]
PLAIN: dict[str, Any] = {"activation": 0, "pre_norm": 1, "scale_embeddings": 1}
CASES: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"pre_norm": 0, "bias": True, "activation": 3},
    "tied": {"tied": True, "scale_embeddings": 0},
    "scaled": {"scale_embeddings": math.sqrt(WIDTH), "queries_scale": 0.7},
    "gated": {"gated": True, "rms": True, "activation": 2},
    "embedding-norm": {"embedding_norm": True, "final_norm": False},
    "computed-positions": {"computed": True},
    "marian": {"zero": True, "pre_norm": 0, "bias": True, "scale_embeddings": 1},
    "wide-heads": {"head_dim": 8},
    "int8": {"type": torch.int8, "tied": True},
    "int16": {"type": torch.int16},
    "float16": {"type": torch.float16},
    "bfloat16": {"type": torch.bfloat16},
}


class Model:
    """Random variables of a TransformerSpec, how they are stored, and what is computed with them."""

    def __init__(self, **changes: Any) -> None:
        self.how = how = {**PLAIN, **changes}
        inner = HEADS * how.get("head_dim", WIDTH // HEADS)
        random = Random(3)
        sides = {"encoder": ["self_attention"], "decoder": ["self_attention", "attention"]}
        for side, parts in sides.items():
            random.add(f"{side}/embeddings{'_0' if side == 'encoder' else ''}/weight", VOCAB, WIDTH)
            if not how.get("computed"):
                random.add(f"{side}/position_encodings/encodings", POSITIONS, WIDTH)
            if how.get("embedding_norm"):
                self.norm_of(random, f"{side}/layernorm_embedding")
            if how["pre_norm"] and how.get("final_norm", True):
                self.norm_of(random, f"{side}/layer_norm")
            for i in range(2):
                for part in parts:
                    shapes = [(3 * inner, WIDTH), (WIDTH, inner)]
                    if part == "attention":
                        shapes = [(inner, WIDTH), (2 * inner, WIDTH), (WIDTH, inner)]
                    for j, shape in enumerate(shapes):
                        self.linear_of(random, f"{side}/layer_{i}/{part}/linear_{j}", *shape)
                    self.norm_of(random, f"{side}/layer_{i}/{part}/layer_norm")
                self.linear_of(random, f"{side}/layer_{i}/ffn/linear_0", FF, WIDTH)
                if how.get("gated"):
                    self.linear_of(random, f"{side}/layer_{i}/ffn/linear_0_noact", FF, WIDTH)
                self.linear_of(random, f"{side}/layer_{i}/ffn/linear_1", WIDTH, FF)
                self.norm_of(random, f"{side}/layer_{i}/ffn/layer_norm")
        random.add("decoder/projection/weight", VOCAB, WIDTH)
        if how.get("bias"):
            random.add("decoder/projection/bias", VOCAB, scale=0.3)
        random.tensors["decoder/embeddings/weight"][2] *= 1.5
        self.stored, self.aliases = random.tensors, {}
        if how.get("tied"):
            for alias in ("decoder/projection/weight", "encoder/embeddings_0/weight"):
                del self.stored[alias]
                self.aliases[alias] = "decoder/embeddings/weight"
        self.tensors = {name: tensor.clone() for name, tensor in self.stored.items()}
        if "type" in how:
            self.store(how["type"])
        self.tensors |= {alias: self.tensors[name] for alias, name in self.aliases.items()}
        self.eps = 1e-6 if how.get("rms") else 1e-5

    def linear_of(self, random: Random, name: str, out: int, into: int) -> None:
        random.add(f"{name}/weight", out, into)
        random.add(f"{name}/bias", out, scale=0.1)

    def norm_of(self, random: Random, name: str) -> None:
        random.add(f"{name}/gamma", WIDTH, scale=0.1, around=1.0)
        if not self.how.get("rms"):
            random.add(f"{name}/beta", WIDTH, scale=0.1)

    def store(self, kind: torch.dtype) -> None:
        """Round, as `LayerSpec._quantize` does; int16 has one scale a tensor, int8 one a row."""
        for name, tensor in [*self.stored.items()]:
            if kind.is_floating_point:
                self.stored[name] = tensor.to(kind)
                self.tensors[name] = tensor.to(kind).float()
            elif name.endswith("weight"):
                most = tensor.abs().amax(1) if kind == torch.int8 else tensor.abs().max()
                scale = (127 if kind == torch.int8 else 1024) / most
                rounded = (tensor * (scale[:, None] if scale.dim() else scale)).round()
                self.stored |= {name: rounded.to(kind), f"{name}_scale": scale}
                self.tensors[name] = rounded / (scale[:, None] if scale.dim() else scale)

    def numbers(self) -> dict[str, Tensor]:
        found = {}
        for side in ("encoder", "decoder"):
            found[f"{side}/num_heads"] = torch.tensor(HEADS, dtype=torch.int16)
            for name in ("activation", "pre_norm", "scale_embeddings"):
                value = self.how[name]
                found[f"{side}/{name}"] = torch.tensor(value, dtype=None if isinstance(value, float) else torch.int8)
            for i in range(2):
                for part in ("self_attention", "attention"):
                    if "queries_scale" in self.how:
                        found[f"{side}/layer_{i}/{part}/queries_scale"] = torch.tensor(self.how["queries_scale"])
                    if "head_dim" in self.how:
                        head_dim = torch.tensor(self.how["head_dim"], dtype=torch.int32)
                        found[f"{side}/layer_{i}/{part}/head_dim"] = head_dim
        found["encoder/embeddings_merge"] = torch.tensor(0, dtype=torch.int8)
        found["encoder/multi_query_attention"] = torch.tensor(0, dtype=torch.int8)
        found["decoder/start_from_zero_embedding"] = torch.tensor(self.how.get("zero", 0), dtype=torch.int8)
        for name, value in (("alignment_layer", -1), ("alignment_heads", 1)):
            found[f"decoder/{name}"] = torch.tensor(value, dtype=torch.int16)
        for name in ("alibi", "alibi_use_positive_positions", "scale_alibi"):
            found[f"decoder/{name}"] = torch.tensor(0, dtype=torch.int8)
        return found

    def write(self, folder: Path, more: Mapping[str, Tensor] | None = None, **config: Any) -> Path:
        folder.mkdir()
        variables = {**self.stored, **self.numbers(), **(more or {})}
        with (folder / "model.bin").open("wb") as file:
            file.write(struct.pack("<I", 6) + text("TransformerSpec") + struct.pack("<II", 7, len(variables)))
            for name, tensor in sorted(variables.items()):
                sizes = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                file.write(text(name) + sizes + struct.pack("<BI", TYPES.index(tensor.dtype), len(data)) + data)
            file.write(struct.pack("<I", len(self.aliases)))
            for alias, name in self.aliases.items():
                file.write(text(alias) + text(name))
        described = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "decoder_start_token": "<s>"}
        described |= {"add_source_bos": False, "add_source_eos": True, "layer_norm_epsilon": None, **config}
        (folder / "config.json").write_text(json.dumps(described))
        (folder / "shared_vocabulary.json").write_text(json.dumps(WORDS))
        return folder

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}/weight"].T + self.tensors[f"{name}/bias"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        gain = self.tensors[f"{name}/gamma"]
        if self.how.get("rms"):
            return rms_norm(x, gain, self.eps)
        return layer_norm(x, gain, self.tensors[f"{name}/beta"], self.eps)

    def sublayer(self, x: Tensor, name: str, run: Any) -> Tensor:
        if self.how["pre_norm"]:
            return x + run(self.norm(x, f"{name}/layer_norm"))
        return self.norm(x + run(x), f"{name}/layer_norm")

    def embed(self, side: str, table: str, ids: list[int]) -> Tensor:
        x = self.tensors[f"{side}/{table}/weight"][ids]
        scale = self.how["scale_embeddings"]
        x = x * (scale if isinstance(scale, float) else math.sqrt(WIDTH) if scale else 1.0)
        if side == "decoder" and self.how.get("zero"):
            x = torch.cat((torch.zeros(1, WIDTH), x[1:]))
        x = x + (sines(len(x)) if self.how.get("computed") else self.position(side, len(x)))
        return self.norm(x, f"{side}/layernorm_embedding") if self.how.get("embedding_norm") else x

    def position(self, side: str, count: int) -> Tensor:
        return self.tensors[f"{side}/position_encodings/encodings"][:count]

    def finish(self, x: Tensor, side: str) -> Tensor:
        return self.norm(x, f"{side}/layer_norm") if f"{side}/layer_norm/gamma" in self.tensors else x

    def feed(self, x: Tensor, layer: str) -> Tensor:
        kinds = {0: torch.relu, 2: F.silu, 3: F.gelu}
        hidden = kinds[self.how["activation"]](self.linear(x, f"{layer}/ffn/linear_0"))
        if self.how.get("gated"):
            hidden = hidden * self.linear(x, f"{layer}/ffn/linear_0_noact")
        return self.linear(hidden, f"{layer}/ffn/linear_1")

    def self_attention(self, x: Tensor, name: str, causal: bool) -> Tensor:
        q, k, v = self.linear(x, f"{name}/linear_0").chunk(3, 1)
        return self.linear(attend(self.scaled(q), k, v, HEADS, causal), f"{name}/linear_1")

    def scaled(self, q: Tensor) -> Tensor:
        """`attend` divides by the root of a head's width."""
        return q * self.how["queries_scale"] * math.sqrt(WIDTH // HEADS) if "queries_scale" in self.how else q

    def encode(self, ids: list[int]) -> Tensor:
        x = self.embed("encoder", "embeddings_0", ids)
        for i in range(2):
            layer = f"encoder/layer_{i}"
            name = f"{layer}/self_attention"
            x = self.sublayer(x, name, lambda y, name=name: self.self_attention(y, name, False))
            x = self.sublayer(x, f"{layer}/ffn", lambda y, layer=layer: self.feed(y, layer))
        return self.finish(x, "encoder")

    def decode(self, memory: Tensor, ids: list[int]) -> Tensor:
        x = self.embed("decoder", "embeddings", [min(i, VOCAB - 1) for i in ids])
        for i in range(2):
            layer = f"decoder/layer_{i}"
            name, cross = f"{layer}/self_attention", f"{layer}/attention"

            def look(y: Tensor, cross: str = cross) -> Tensor:
                k, v = self.linear(memory, f"{cross}/linear_1").chunk(2, 1)
                q = self.scaled(self.linear(y, f"{cross}/linear_0"))
                return self.linear(attend(q, k, v, HEADS), f"{cross}/linear_2")

            x = self.sublayer(x, name, lambda y, name=name: self.self_attention(y, name, True))
            x = self.sublayer(x, cross, look)
            x = self.sublayer(x, f"{layer}/ffn", lambda y, layer=layer: self.feed(y, layer))
        logits = self.finish(x, "decoder") @ self.tensors["decoder/projection/weight"].T
        return logits + self.tensors.get("decoder/projection/bias", torch.zeros(VOCAB))


def text(name: str) -> bytes:
    return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"


def sines(count: int) -> Tensor:
    half = WIDTH // 2
    rows = []
    for position in range(1, count + 1):
        angles = [position * 10000 ** (-i / (half - 1)) for i in range(half)]
        rows.append([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
    return torch.tensor(rows)


@pytest.mark.parametrize("case", long_but(list(CASES), "pre-norm", "gated", "marian", "int8"))
def test_equals_a_plain_model(case: str, tmp_path: Path) -> None:
    model = Model(**CASES[case])
    path = model.write(tmp_path / "model")
    assert recognised(path) == "ctranslate2"
    options = ImportOptions(model={"max_positions": POSITIONS})
    imported, _ = imported_as("ctranslate2", path, tmp_path / "run", model.encode, model.decode, options)
    assert imported.config.share_embeddings == ("all" if "tied" in CASES[case] else "none")
    assert imported.tokenizers.source_ids("w5 w9 nothing") == [5, 9, 0, 2]
    assert imported.tokenizers.target_text([7, 8]) == "w7 w8"


@pytest.mark.skipif(not find_spec("ctranslate2"), reason="needs the ctranslate2 package")
@pytest.mark.parametrize("case", CASES)
def test_equals_ctranslate2(case: str, tmp_path: Path) -> None:
    path = Model(**CASES[case]).write(tmp_path / "model")
    _, found = import_checkpoint("ctranslate2", path, tmp_path / "run")
    assert found.original.startswith("ctranslate2") and found.passed, found
    assert all(equal.startswith("60 of") for equal in found.tokens.values()), found


@pytest.mark.skipif(not find_spec("ctranslate2"), reason="needs the ctranslate2 package")
@pytest.mark.parametrize("ends", [True, False])
def test_empty_lines_are_left_out(ends: bool, tmp_path: Path) -> None:
    """ctranslate2 gives no log-probabilities for them."""
    path = Model().write(tmp_path / "model", add_source_eos=ends)
    _, found = import_checkpoint("ctranslate2", path, tmp_path / "run", lines=["w5 w6", "w7", "", "  "])
    assert found.passed and found.original and found.sentences == 60


def test_languages(tmp_path: Path) -> None:
    """Sources begin with a language and end, outputs begin with one, as those of NLLB do."""
    path = Model().write(tmp_path / "model", add_source_eos=False, decoder_start_token="</s>")
    options = ImportOptions(src_lang="w10", tgt_lang="w11")
    imported, _ = import_checkpoint("ctranslate2", path, tmp_path / "run", options)
    assert imported.tokenizers.source_ids("w5") == [10, 5, 2]
    assert imported.decoding == {"first_ids": [11], "first_adds_zero": True}
    assert (imported.config.start_id, imported.tokenizers.target_text([11, 6, 7])) == (2, "w6 w7")


def test_text_of_older_models(tmp_path: Path) -> None:
    """Their model.bin says which tokens are special; vocabularies are text files, and sources may not end."""
    texts = {name: torch.tensor([*token.encode()], dtype=torch.int8) for name, token in (("unk_token", "w4"),)}
    path = Model().write(tmp_path / "model", {**texts, "with_source_bos": torch.tensor(1, dtype=torch.int8)})
    binary = (path / "model.bin").read_bytes()
    (path / "model.bin").write_bytes(struct.pack("<I", 5) + binary[4:])
    (path / "config.json").unlink()
    (path / "shared_vocabulary.json").unlink()
    (path / "shared_vocabulary.txt").write_text("".join(f"{word}\n" for word in WORDS))
    imported, _ = import_checkpoint("ctranslate2", path, tmp_path / "run")
    assert imported.tokenizers.source_ids("w5 nothing") == [1, 5, 4]
    assert any("no end token" in note for note in imported.notes)


def number(value: float, kind: torch.dtype = torch.int8) -> Tensor:
    return torch.tensor(value, dtype=kind)


WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "shaw": ({"encoder/layer_0/self_attention/relative_position_keys": torch.zeros(3, 4)}, "relative_position_keys"),
    "rotary": ({"decoder/layer_0/self_attention/rotary_dim": number(4)}, "rotary_dim=4"),
    "alibi": ({"decoder/alibi": number(1)}, "alibi=1"),
    "shared keys": ({"encoder/multi_query_attention": number(1)}, "multi_query_attention=1"),
    "features": ({"encoder/embeddings_1/weight": torch.zeros(4, WIDTH)}, "embeddings_1"),
    "activation": ({f"{side}/activation": number(5) for side in ("encoder", "decoder")}, "activation=tanh"),
    **{
        f"activation {i}": ({f"{side}/activation": number(i) for side in ("encoder", "decoder")}, f"activation={i} is")
        for i in (7, 14, -1)
    },
    "scale": ({"encoder/scale_embeddings": torch.tensor(3.0)}, "encoder/scale_embeddings=3"),
    "surplus": ({"decoder/layer_0/ffn/strange/weight": torch.zeros(2, 2)}, "strange/weight"),
    "shape": ({"encoder/layer_1/ffn/linear_0/bias": torch.zeros(FF + 1)}, r"encoder.1.ff.up.bias would be \(25,\)"),
    "NaN": ({"decoder/layer_0/ffn/linear_0/bias": torch.full((FF,), math.nan)}, "NaN or infinite values"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused(case: str, tmp_path: Path) -> None:
    more, message = WRONG[case]
    path = Model().write(tmp_path / "model", more)
    refused(path, tmp_path / "run", message)


def test_damaged(tmp_path: Path) -> None:
    path = Model(type=torch.int8).write(tmp_path / "model")
    whole = (path / "model.bin").read_bytes()
    (path / "model.bin").unlink()
    refused(path, tmp_path / "run", "model is incomplete: model.bin is missing")
    for end in (0, 3, 20, 500, len(whole) // 2, len(whole) - 3):
        (path / "model.bin").write_bytes(whole[:end])
        refused(path, tmp_path / "run", "is damaged")
    (path / "model.bin").write_bytes(whole.replace(b"TransformerSpec", b"TransformerSpex"))
    refused(path, tmp_path / "run", "TransformerSpex")
    (path / "model.bin").write_bytes(
        whole.replace(b"encoder/layer_0/ffn/linear_1/weight_scale", b"encoder/layer_0/ffn/linear_1/weight_scald")
    )
    refused(path, tmp_path / "run", "quantized without a scale")
    (path / "model.bin").write_bytes(b"\7" + whole[1:])
    refused(path, tmp_path / "run", "binary version 7")
    (path / "model.bin").write_bytes(whole)
    (path / "shared_vocabulary.json").write_text(json.dumps(WORDS[:-1]))
    refused(path, tmp_path / "run", "the vocabulary has 39")
    (path / "shared_vocabulary.json").write_text(json.dumps(WORDS[3:]))
    refused(path, tmp_path / "run", "has no '<unk>'")


def refused(path: Path, out: Path, message: str) -> None:
    with pytest.raises(TformerError, match=message) as caught:
        import_checkpoint("ctranslate2", path, out, comparing=False)
    assert "\n" not in str(caught.value)
    assert not out.exists()
