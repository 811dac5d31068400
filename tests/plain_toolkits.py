"""Small models as OpenNMT-py, fairseq, JoeyNMT, Sockeye and Marian write and compute them.

Each class says how a toolkit names and shapes its tensors, what it writes beside them, and how it computes; written
from the toolkits' code. The importers were compared with the toolkits themselves when they were written.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

from tformer_deploy.importers.base import ImportOptions

from .plain_transformer import Random, attend, layer_norm, rms_norm

VOCAB, WIDTH, FF, HEADS, POSITIONS = 40, 16, 24, 4, 10
SIZE = WIDTH // HEADS
ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "swish": F.silu, "swish1": F.silu}


class Toolkit:
    """A model of two layers a side: random tensors, a file, and the computation."""

    format = ""
    file = ""
    eps = 1e-6
    words: ClassVar[list[str]] = ["<unk>", "<pad>", "<s>", "</s>"]

    def __init__(self, **how: Any) -> None:
        self.how = {"activation": "relu", "pre": True, "scale": True, **how}
        self.random = Random(5)
        self.t = self.random.tensors
        self.vocabulary = [*self.words, *(f"w{i}" for i in range(len(self.words), VOCAB))]
        self.make()

    def make(self) -> None: ...

    def write(self, folder: Path) -> Path:
        raise NotImplementedError

    def options(self, path: Path) -> ImportOptions:
        return ImportOptions(model={"max_positions": POSITIONS})

    def layer(self, side: str, i: int) -> str:
        return f"{side}.layers.{i}"

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.t[f"{name}.weight"].T + self.t.get(f"{name}.bias", torch.zeros(1))

    def norm(self, x: Tensor, name: str) -> Tensor:
        if self.how.get("rms"):
            return rms_norm(x, self.t[f"{name}.weight"], self.eps)
        return layer_norm(x, self.t[f"{name}.weight"], self.t[f"{name}.bias"], self.eps)

    def table(self, side: str) -> Tensor:
        raise NotImplementedError

    def positions(self, side: str, count: int) -> Tensor:
        raise NotImplementedError

    def output(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def attention(self, x: Tensor, y: Tensor, layer: str, part: str, causal: bool) -> Tensor:
        """Of queries x over y."""
        raise NotImplementedError

    def feed(self, x: Tensor, layer: str) -> Tensor:
        raise NotImplementedError

    def name_of_norm(self, layer: str, part: str) -> str:
        raise NotImplementedError

    def final(self, x: Tensor, side: str) -> Tensor:
        return self.norm(x, f"{side}.layer_norm") if self.how["pre"] else x

    def embed(self, side: str, ids: list[int]) -> Tensor:
        x = self.table(side)[ids] * (math.sqrt(WIDTH) if self.how["scale"] else 1.0)
        return x + self.positions(side, len(ids))

    def sublayer(self, x: Tensor, norm: str, run: Any) -> Tensor:
        return x + run(self.norm(x, norm)) if self.how["pre"] else self.norm(x + run(x), norm)

    def encode(self, ids: list[int]) -> Tensor:
        return self.run("encoder", ids, None)

    def decode(self, memory: Tensor, ids: list[int]) -> Tensor:
        return self.output(self.run("decoder", ids, memory))

    def run(self, side: str, ids: list[int], memory: Tensor | None) -> Tensor:
        x = self.embed(side, ids)
        for i in range(2):
            layer = self.layer(side, i)
            causal = memory is not None
            own = self.name_of_norm(layer, "self")
            x = self.sublayer(x, own, lambda y, n=layer, c=causal: self.attention(y, y, n, "self", c))
            if memory is not None:
                cross = self.name_of_norm(layer, "cross")
                x = self.sublayer(x, cross, lambda y, n=layer: self.attention(y, memory, n, "cross", False))
            x = self.sublayer(x, self.name_of_norm(layer, "ff"), lambda y, n=layer: self.feed(y, n))
        return self.final(x, side)

    def separate(self, x: Tensor, y: Tensor, names: list[str], causal: bool) -> Tensor:
        """Attention by four linear layers."""
        q, k, v = self.linear(x, names[0]), self.linear(y, names[1]), self.linear(y, names[2])
        return self.linear(attend(q, k, v, HEADS, causal), names[3])


def interleaved() -> Tensor:
    """Sine, cosine, sine and so on."""
    rows = []
    for p in range(50):
        angles = [p / 10000 ** (2 * i / WIDTH) for i in range(WIDTH // 2)]
        rows.append([f(a) for a in angles for f in (math.sin, math.cos)])
    return torch.tensor(rows)


def halves(first: int, count: int) -> Tensor:
    """Sines, then cosines, as tensor2tensor, fairseq and Marian have them."""
    rows = []
    for p in range(first, first + count):
        angles = [p * math.exp(-i * math.log(10000) / (WIDTH // 2 - 1)) for i in range(WIDTH // 2)]
        rows.append([*map(math.sin, angles), *map(math.cos, angles)])
    return torch.tensor(rows)


class OpenNmt(Toolkit):
    format, file = "opennmt-py", "model_step_10.pt"
    words: ClassVar[list[str]] = ["<unk>", "<blank>", "<s>", "</s>"]
    lut, pe = "embeddings.make_embedding.emb_luts.0.weight", "embeddings.make_embedding.pe.pe"

    def layer(self, side: str, i: int) -> str:
        return f"{side}.transformer{'_layers' if side == 'decoder' else ''}.{i}"

    def make(self) -> None:
        gated = self.how["activation"] in ("silu", "gated-gelu")
        for side, parts in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "context_attn"])):
            self.random.add(f"{side}.{self.lut}", VOCAB, WIDTH)
            self.t[f"{side}.{self.pe}"] = (halves(0, 50) if self.how.get("concat") else interleaved())[:, None]
            self.random.norm(f"{side}.layer_norm", WIDTH)
            for i in range(2):
                layer = self.layer(side, i)
                for part in parts:
                    for name in ("query", "keys", "values"):
                        self.random.linear(f"{layer}.{part}.linear_{name}", WIDTH, WIDTH)
                    self.random.linear(f"{layer}.{part}.final_linear", WIDTH, WIDTH)
                for name in ["layer_norm"] if side == "encoder" else ["layer_norm_1", "layer_norm_2"]:
                    self.random.norm(f"{layer}.{name}", WIDTH)
                self.random.linear(f"{layer}.feed_forward.w_1", FF, WIDTH)
                self.random.linear(f"{layer}.feed_forward.w_2", WIDTH, FF)
                if gated:
                    self.random.linear(f"{layer}.feed_forward.w_3", FF, WIDTH)
                self.random.norm(f"{layer}.feed_forward.layer_norm", WIDTH)
        self.random.linear("generator", VOCAB, WIDTH)
        if self.how.get("rms"):
            for name in [name for name in self.t if "norm" in name and name.endswith("bias")]:
                del self.t[name]
        if not self.how.get("qkv_bias", True):
            for name in [name for name in self.t if "_attn." in name and name.endswith("bias")]:
                del self.t[name]

    def write(self, folder: Path) -> Path:
        opt = {
            **dict.fromkeys(("encoder_type", "decoder_type"), "transformer"),
            "model_task": "seq2seq",
            "self_attn_type": "scaled-dot",
            "position_encoding": True,
            "max_relative_positions": 0,
            "heads": HEADS,
            "pos_ffn_activation_fn": self.how["activation"],
            "layer_norm": "rms" if self.how.get("rms") else "standard",
            "norm_eps": self.eps,
            "lora_layers": [],
            "copy_attn": False,
            **self.how.get("opt", {}),
        }
        model = OrderedDict((name, tensor) for name, tensor in self.t.items() if "generator" not in name)
        generator = {name: self.t[f"generator.{name}"] for name in ("weight", "bias")}
        vocab = {"src": self.vocabulary, "tgt": self.vocabulary, "data_task": "seq2seq", "decoder_start_token": "<s>"}
        parts = {"model": model, "generator": generator, "vocab": vocab, "opt": Namespace(**opt), "optim": {}}
        torch.save(parts, folder / self.file)
        return folder / self.file

    def table(self, side: str) -> Tensor:
        return self.t[f"{side}.{self.lut}"]

    def positions(self, side: str, count: int) -> Tensor:
        return self.t[f"{side}.{self.pe}"][:count, 0]

    def output(self, x: Tensor) -> Tensor:
        return self.linear(x, "generator")

    def name_of_norm(self, layer: str, part: str) -> str:
        own = "layer_norm" if layer.startswith("encoder") else "layer_norm_1"
        return f"{layer}.{({'self': own, 'cross': 'layer_norm_2', 'ff': 'feed_forward.layer_norm'})[part]}"

    def attention(self, x: Tensor, y: Tensor, layer: str, part: str, causal: bool) -> Tensor:
        block = f"{layer}.{'self_attn' if part == 'self' else 'context_attn'}"
        parts = ("linear_query", "linear_keys", "linear_values", "final_linear")
        return self.separate(x, y, [f"{block}.{name}" for name in parts], causal)

    def feed(self, x: Tensor, layer: str) -> Tensor:
        kind = self.how["activation"].removeprefix("gated-")
        hidden = ACTIVATIONS[kind](self.linear(x, f"{layer}.feed_forward.w_1"))
        if f"{layer}.feed_forward.w_3.weight" in self.t:
            hidden = hidden * self.linear(x, f"{layer}.feed_forward.w_3")
        return self.linear(hidden, f"{layer}.feed_forward.w_2")


class Fairseq(Toolkit):
    format, file, eps = "fairseq", "checkpoint_best.pt", 1e-5
    words: ClassVar[list[str]] = ["<s>", "<pad>", "</s>", "<unk>"]

    def make(self) -> None:
        for side, parts in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
            self.random.add(f"{side}.embed_tokens.weight", VOCAB, WIDTH)
            if self.how.get("learned"):
                self.random.add(f"{side}.embed_positions.weight", 30 + 2, WIDTH)
            else:
                self.t[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
            if self.how["pre"]:
                self.random.norm(f"{side}.layer_norm", WIDTH)
            if self.how.get("embedding_norm"):
                self.random.norm(f"{side}.layernorm_embedding", WIDTH)
            self.t[f"{side}.version"] = torch.tensor([3.0])
            for i in range(2):
                for part in parts:
                    for name in ("q", "k", "v", "out"):
                        self.random.linear(f"{side}.layers.{i}.{part}.{name}_proj", WIDTH, WIDTH)
                    self.random.norm(f"{side}.layers.{i}.{part}_layer_norm", WIDTH)
                self.random.linear(f"{side}.layers.{i}.fc1", FF, WIDTH)
                self.random.linear(f"{side}.layers.{i}.fc2", WIDTH, FF)
                self.random.norm(f"{side}.layers.{i}.final_layer_norm", WIDTH)
                if side == "encoder":
                    self.random.add(f"{side}.layers.{i}.in_proj_weight", 3 * WIDTH, WIDTH)
        if self.how.get("tied"):
            self.t["encoder.embed_tokens.weight"] = self.t["decoder.embed_tokens.weight"]
        self.t["decoder.output_projection.weight"] = self.t["decoder.embed_tokens.weight"]
        if not self.how.get("tied"):
            self.random.add("decoder.output_projection.weight", VOCAB, WIDTH)

    def write(self, folder: Path) -> Path:
        heads = {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")}
        before = {f"{side}_normalize_before": self.how["pre"] for side in ("encoder", "decoder")}
        given = {
            "arch": "transformer",
            "activation_fn": self.how["activation"],
            "no_scale_embedding": not self.how["scale"],
            "max_source_positions": 1024,
            "max_target_positions": 1024,
            **heads,
            **before,
            **self.how.get("opt", {}),
        }
        args = Namespace(**given)
        task = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
        parts: dict[str, Any] = {
            "model": self.t,
            "extra_state": {"epoch": 1},
            "optimizer_history": [{"num_updates": 1}],
        }
        if self.how.get("cfg"):
            parts |= {"args": None, "cfg": {"model": args, "task": task}}
        else:
            vars(args).update({**task, "task": "translation", **self.how.get("opt", {})})
            parts["args"] = args
        torch.save(parts, folder / self.file)
        for lang in ("de", "en"):
            (folder / f"dict.{lang}.txt").write_text("".join(f"{word} 7\n" for word in self.vocabulary[4:]))
        return folder / self.file

    def table(self, side: str) -> Tensor:
        return self.t[f"{side}.embed_tokens.weight"]

    def positions(self, side: str, count: int) -> Tensor:
        if self.how.get("learned"):
            return self.t[f"{side}.embed_positions.weight"][2 : 2 + count]
        return halves(2, count)

    def embed(self, side: str, ids: list[int]) -> Tensor:
        x = super().embed(side, ids)
        return self.norm(x, f"{side}.layernorm_embedding") if self.how.get("embedding_norm") else x

    def output(self, x: Tensor) -> Tensor:
        return x @ self.t["decoder.output_projection.weight"].T

    def name_of_norm(self, layer: str, part: str) -> str:
        return f"{layer}.{({'self': 'self_attn', 'cross': 'encoder_attn', 'ff': 'final'})[part]}_layer_norm"

    def attention(self, x: Tensor, y: Tensor, layer: str, part: str, causal: bool) -> Tensor:
        block = f"{layer}.{'self_attn' if part == 'self' else 'encoder_attn'}"
        return self.separate(x, y, [f"{block}.{name}_proj" for name in ("q", "k", "v", "out")], causal)

    def feed(self, x: Tensor, layer: str) -> Tensor:
        return self.linear(ACTIVATIONS[self.how["activation"]](self.linear(x, f"{layer}.fc1")), f"{layer}.fc2")


class Joey(Toolkit):
    format, file = "joeynmt", "best.ckpt"
    own: ClassVar[dict[str, tuple[str, str]]] = {
        "encoder": ("src_src_att", "layer_norm"),
        "decoder": ("trg_trg_att", "x_layer_norm"),
    }

    def make(self) -> None:
        for name in ("src_embed", "trg_embed"):
            self.random.add(f"{name}.lut.weight", VOCAB, WIDTH)
        for side, (own, norm) in self.own.items():
            self.t[f"{side}.pe.pe"] = interleaved()[None]
            if self.how["pre"]:
                self.random.norm(f"{side}.layer_norm", WIDTH)
            for i in range(2):
                layer = self.layer(side, i)
                for part in [own] if side == "encoder" else [own, "src_trg_att"]:
                    for name in ("k_layer", "v_layer", "q_layer", "output_layer"):
                        self.random.linear(f"{layer}.{part}.{name}", WIDTH, WIDTH)
                for name in [norm] if side == "encoder" else [norm, "dec_layer_norm"]:
                    self.random.norm(f"{layer}.{name}", WIDTH)
                self.random.norm(f"{layer}.feed_forward.layer_norm", WIDTH)
                self.random.linear(f"{layer}.feed_forward.pwff_layer.0", FF, WIDTH)
                self.random.linear(f"{layer}.feed_forward.pwff_layer.3", WIDTH, FF)
        self.random.add("decoder.output_layer.weight", VOCAB, WIDTH)
        if self.how.get("tied"):
            self.t["decoder.output_layer.weight"] = self.t["trg_embed.lut.weight"]

    def write(self, folder: Path) -> Path:
        side = {
            "type": "transformer",
            "num_layers": 2,
            "num_heads": HEADS,
            "embeddings": {"embedding_dim": WIDTH, "scale": self.how["scale"]},
            "layer_norm": "pre" if self.how["pre"] else "post",
            "activation": self.how["activation"],
            **self.how.get("opt", {}),
        }
        data = {name: {"lang": name, "level": "word", "lowercase": True} for name in ("src", "trg")}
        config = {"name": "test", "data": data, "model": {"encoder": side, "decoder": side}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        for name in ("src", "trg"):
            (folder / f"{name}_vocab.txt").write_text("".join(f"{word}\n" for word in self.vocabulary))
        torch.save({"steps": 3, "model_state": self.t, "best_ckpt_score": math.inf}, folder / self.file)
        return folder / self.file

    def table(self, side: str) -> Tensor:
        return self.t[f"{'src' if side == 'encoder' else 'trg'}_embed.lut.weight"]

    def positions(self, side: str, count: int) -> Tensor:
        return self.t[f"{side}.pe.pe"][0, :count]

    def output(self, x: Tensor) -> Tensor:
        return x @ self.t["decoder.output_layer.weight"].T

    def name_of_norm(self, layer: str, part: str) -> str:
        own = self.own[layer.split(".")[0]][1]
        return f"{layer}.{({'self': own, 'cross': 'dec_layer_norm', 'ff': 'feed_forward.layer_norm'})[part]}"

    def attention(self, x: Tensor, y: Tensor, layer: str, part: str, causal: bool) -> Tensor:
        block = f"{layer}.{self.own[layer.split('.')[0]][0] if part == 'self' else 'src_trg_att'}"
        names = ("q_layer", "k_layer", "v_layer", "output_layer")
        return self.separate(x, y, [f"{block}.{name}" for name in names], causal)

    def feed(self, x: Tensor, layer: str) -> Tensor:
        hidden = ACTIVATIONS[self.how["activation"]](self.linear(x, f"{layer}.feed_forward.pwff_layer.0"))
        return self.linear(hidden, f"{layer}.feed_forward.pwff_layer.3")


class Sockeye(Toolkit):
    format, file = "sockeye", "."
    words: ClassVar[list[str]] = ["<pad>", "<unk>", "<s>", "</s>"]

    def make(self) -> None:
        order = "pre" if self.how["pre"] else "post"
        for name in ("embedding_source", "embedding_target"):
            self.random.add(f"{name}.embedding.weight", VOCAB, WIDTH)
        for side, own in (("encoder", "self_attention"), ("decoder", "autoregr_layer")):
            self.random.add(f"{side}.pos_embedding.weight", 30, WIDTH)
            if self.how["pre"]:
                self.random.norm(f"{side}.final_process.layer_norm", WIDTH)
            for i in range(2):
                layer = self.layer(side, i)
                self.random.add(f"{layer}.{own}.ff_in.weight", 3 * WIDTH, WIDTH)
                self.random.add(f"{layer}.{own}.ff_out.weight", WIDTH, WIDTH)
                if side == "decoder":
                    self.random.add(f"{layer}.enc_attention.ff_q.weight", WIDTH, WIDTH)
                    self.random.add(f"{layer}.enc_attention.ff_kv.weight", 2 * WIDTH, WIDTH)
                    self.random.add(f"{layer}.enc_attention.ff_out.weight", WIDTH, WIDTH)
                for part in [own, "ff"] if side == "encoder" else [own, "enc_attention", "ff"]:
                    self.random.norm(f"{layer}.{order}_{part}.layer_norm", WIDTH)
                self.random.linear(f"{layer}.ff.ff1", FF, WIDTH)
                self.random.linear(f"{layer}.ff.ff2", WIDTH, FF)
                if self.how.get("glu"):
                    self.random.linear(f"{layer}.ff.linear", FF, WIDTH)
        self.random.linear("output_layer", VOCAB, WIDTH)
        if self.how.get("tied"):
            table = self.t["embedding_target.embedding.weight"]
            self.t |= {"embedding_source.embedding.weight": table, "output_layer.weight": table}

    def write(self, folder: Path) -> Path:
        torch.save(self.t, folder / "params.best")
        side = {
            "model_size": WIDTH,
            "attention_heads": HEADS,
            "feed_forward_num_hidden": FF,
            "num_layers": 2,
            "act_type": self.how["activation"],
            "use_glu": self.how.get("glu", False),
            "preprocess_sequence": "n" if self.how["pre"] else "",
            "postprocess_sequence": "dr" if self.how["pre"] else "drn",
            **self.how.get("opt", {}),
        }
        parts = {"config_encoder": side, "config_decoder": side, "config_data": {"buckets": [1, 2]}}
        embeds = {
            f"config_embed_{name}": {"vocab_size": VOCAB, "factor_configs": None} for name in ("source", "target")
        }
        text = "!ModelConfig\nlhuc: false\ndtype: float32\n"
        kinds = {"config_encoder": "TransformerConfig", "config_decoder": "TransformerConfig"}
        for name, part in {**parts, **embeds}.items():
            body = yaml.safe_dump(part).replace("\n", "\n  ").rstrip()
            text += f"{name}: !{kinds.get(name, 'Config')}\n  {body}\n"
        (folder / "config").write_text(text.replace("- 1\n", "- !!python/tuple [1, 2]\n"))
        (folder / "version").write_text("3.1.34")
        for name in ("src", "trg"):
            (folder / f"vocab.{name}.0.json").write_text(json.dumps({w: i for i, w in enumerate(self.vocabulary)}))
        return folder

    def table(self, side: str) -> Tensor:
        return self.t[f"embedding_{'source' if side == 'encoder' else 'target'}.embedding.weight"]

    def positions(self, side: str, count: int) -> Tensor:
        return self.t[f"{side}.pos_embedding.weight"][:count]

    def output(self, x: Tensor) -> Tensor:
        return self.linear(x, "output_layer")

    def final(self, x: Tensor, side: str) -> Tensor:
        return self.norm(x, f"{side}.final_process.layer_norm") if self.how["pre"] else x

    def part(self, layer: str, part: str) -> str:
        own = "self_attention" if layer.startswith("encoder") else "autoregr_layer"
        return {"self": own, "cross": "enc_attention", "ff": "ff"}[part]

    def name_of_norm(self, layer: str, part: str) -> str:
        return f"{layer}.{'pre' if self.how['pre'] else 'post'}_{self.part(layer, part)}.layer_norm"

    def attention(self, x: Tensor, y: Tensor, layer: str, part: str, causal: bool) -> Tensor:
        block = f"{layer}.{self.part(layer, part)}"
        if part == "self":
            both = self.t[f"{block}.ff_in.weight"]
            q, pairs = x @ both[:WIDTH].T, y @ both[WIDTH:].T
        else:
            q, pairs = x @ self.t[f"{block}.ff_q.weight"].T, y @ self.t[f"{block}.ff_kv.weight"].T
        # Head after head, its keys and then its values.
        blocks = pairs.split(SIZE, 1)
        k, v = torch.cat(blocks[0::2], 1), torch.cat(blocks[1::2], 1)
        return attend(q, k, v, HEADS, causal) @ self.t[f"{block}.ff_out.weight"].T

    def feed(self, x: Tensor, layer: str) -> Tensor:
        hidden = ACTIVATIONS[self.how["activation"]](self.linear(x, f"{layer}.ff.ff1"))
        if self.how.get("glu"):
            hidden = hidden * self.linear(x, f"{layer}.ff.linear")
        return self.linear(hidden, f"{layer}.ff.ff2")


def round_to_bytes(tensor: Tensor) -> float:
    """Round values in place to what bytes and a factor hold, and return the factor."""
    factor = 127 / float(tensor.abs().max())
    tensor.copy_((tensor * factor).round() / factor)
    return factor


class Marian(Toolkit):
    format, file = "marian", "model.npz"
    words: ClassVar[list[str]] = ["</s>", "<unk>"]

    def layer(self, side: str, i: int) -> str:
        return f"{side}_l{i + 1}"

    def make(self) -> None:
        suffix = "_pre" if self.how["pre"] else ""
        tables = ["Wemb"] if self.how.get("tied") else ["encoder_Wemb", "decoder_Wemb", "decoder_ff_logit_out_Wt"]
        for name in tables:
            self.random.add(name, VOCAB, WIDTH)
        self.random.add("decoder_ff_logit_out_b", 1, VOCAB, scale=0.2)
        if self.how.get("learned"):
            self.random.add("Wpos", 30, WIDTH)
        for side, parts in (("encoder", ["self"]), ("decoder", ["self", "context"])):
            if self.how["pre"]:
                self.normal(f"{side}_top", "")
            for i in range(2):
                if side == "decoder" and self.how.get("ssru"):
                    parts = ["context"]
                    self.cell(f"{self.layer(side, i)}_rnn", suffix)
                for part in parts:
                    for letter in "qkvo":
                        self.random.add(f"{self.layer(side, i)}_{part}_W{letter}", WIDTH, WIDTH)
                        self.random.add(f"{self.layer(side, i)}_{part}_b{letter}", 1, WIDTH, scale=0.1)
                    self.normal(f"{self.layer(side, i)}_{part}_Wo", suffix)
                for letter, into, out in (("1", WIDTH, FF), ("2", FF, WIDTH)):
                    self.random.add(f"{self.layer(side, i)}_ffn_W{letter}", into, out)
                    self.random.add(f"{self.layer(side, i)}_ffn_b{letter}", 1, out, scale=0.1)
                self.normal(f"{self.layer(side, i)}_ffn_ffn", suffix)
        if self.how.get("int8"):
            self.factors = {name: round_to_bytes(self.t[name]) for name in self.t if self.is_rounded(name)}

    @staticmethod
    def is_rounded(name: str) -> bool:
        """Whether marian-conv makes bytes of a tensor."""
        return name.endswith("Wemb") or "_W" in name[-3:]

    def cell(self, name: str, suffix: str) -> None:
        for letter in ("", "f"):
            self.random.add(f"{name}_W{letter}", WIDTH, WIDTH)
        self.random.add(f"{name}_bf", 1, WIDTH, scale=0.5)
        self.normal(f"{name}_ffn", suffix)

    def normal(self, name: str, suffix: str) -> None:
        self.random.add(f"{name}_ln_scale{suffix}", 1, WIDTH, scale=0.1, around=1.0)
        self.random.add(f"{name}_ln_bias{suffix}", 1, WIDTH, scale=0.1)

    def write(self, folder: Path) -> Path:
        config = {
            "type": "transformer",
            "transformer-decoder-autoreg": "rnn" if self.how.get("ssru") else "self-attention",
            "dec-cell": "ssru" if self.how.get("ssru") else "gru",
            "transformer-no-projection": False,
            "transformer-ffn-depth": 2,
            "transformer-ffn-activation": self.how["activation"],
            "transformer-heads": HEADS,
            "transformer-preprocess": "n" if self.how["pre"] else "",
            "transformer-postprocess": "da" if self.how["pre"] else "dan",
            "transformer-postprocess-emb": "d",
            "transformer-postprocess-top": "n" if self.how["pre"] else "",
            "transformer-train-positions": self.how.get("learned", False),
            "enc-depth": 2,
            "dec-depth": 2,
            "dim-vocabs": [VOCAB, VOCAB],
            "version": "v1.12.0",
            **self.how.get("opt", {}),
        }
        settings = np.frombuffer(yaml.safe_dump(config).encode() + b"\0", np.int8)
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in self.t.items()}
        if self.how.get("binary") or self.how.get("int8"):
            self.file = "model.bin"
            self.write_binary(folder / self.file, {**arrays, "special:model.yml": settings})
        else:
            np.savez(folder / self.file, **{**arrays, "special:model.yml": settings})
        (folder / "vocab.yml").write_text(
            "".join(f"{json.dumps(word)}: {i}\n" for i, word in enumerate(self.vocabulary))
        )
        return folder / self.file

    def write_binary(self, path: Path, arrays: dict[str, Any]) -> None:
        """As marian-conv does: bytes of matrices are transposed, and their factor is behind them."""
        found = []
        for name, array in sorted(arrays.items()):
            kind, data = (0x101 if name.startswith("special") else 0x404), array.tobytes()
            if name in getattr(self, "factors", {}):
                factor = np.float32(self.factors[name])
                whole = np.rint(array * factor).astype(np.int8)
                data = (whole if name.endswith("Wemb") else whole.T).tobytes() + factor.tobytes()
                kind = 0x4101
                found.append((f"{name}_QuantMultA", 0x404, (1, 1), np.float32(self.how.get("range", 9)).tobytes()))
            found.append((name, kind, array.shape, data))
        found = [(name, kind, shape, data + bytes(-len(data) % 256)) for name, kind, shape, data in found]
        names = [name.encode() + b"\0" for name, *_ in found]
        heads = [(len(n), kind, len(shape), len(data)) for n, (_, kind, shape, data) in zip(names, found, strict=True)]
        head = np.array([(1, len(found))], "<u8").tobytes() + np.array(heads, "<u8").tobytes() + b"".join(names)
        head += b"".join(np.array(shape, "<i4").tobytes() for _, _, shape, _ in found)
        padding = -(len(head) + 8) % 256
        head += np.uint64(padding).tobytes() + bytes(padding)
        path.write_bytes(head + b"".join(data for *_, data in found))

    def options(self, path: Path) -> ImportOptions:
        return ImportOptions(vocab=path.parent / "vocab.yml", model={"max_positions": POSITIONS})

    def table(self, side: str) -> Tensor:
        return self.t.get("Wemb", self.t.get(f"{side}_Wemb", torch.empty(0)))

    def positions(self, side: str, count: int) -> Tensor:
        return self.t["Wpos"][:count] if self.how.get("learned") else halves(0, count)

    def embed(self, side: str, ids: list[int]) -> Tensor:
        x = self.table(side)[[min(i, VOCAB - 1) for i in ids]]
        if side == "decoder":
            x = torch.cat((torch.zeros(1, WIDTH), x[1:]))
        return x * (1.0 if self.how.get("learned") else math.sqrt(WIDTH)) + self.positions(side, len(ids))

    def output(self, x: Tensor) -> Tensor:
        weight = self.t.get("decoder_ff_logit_out_Wt", self.t.get("Wemb", torch.empty(0)))
        return x @ weight.T + self.t["decoder_ff_logit_out_b"]

    def final(self, x: Tensor, side: str) -> Tensor:
        return self.norm(x, f"{side}_top/") if self.how["pre"] else x

    def norm(self, x: Tensor, name: str) -> Tensor:
        stem, suffix = name.split("/")
        return layer_norm(x, self.t[f"{stem}_ln_scale{suffix}"], self.t[f"{stem}_ln_bias{suffix}"], self.eps)

    def name_of_norm(self, layer: str, part: str) -> str:
        recurrent = self.how.get("ssru") and layer.startswith("decoder")
        stem = {"self": "rnn_ffn" if recurrent else "self_Wo", "cross": "context_Wo", "ff": "ffn_ffn"}[part]
        return f"{layer}_{stem}/{'_pre' if self.how['pre'] else ''}"

    def recur(self, x: Tensor, name: str) -> Tensor:
        """Marian's `highway(cell, x, f)`, then relu."""
        state, found = torch.zeros(WIDTH), []
        for row in x:
            keep = 1 / (1 + torch.exp(-self.dense(row, name, "f")[0]))
            state = keep * state + (1 - keep) * (row @ self.t[f"{name}_W"])
            found.append(state.clamp(min=0))
        return torch.stack(found)

    def dense(self, x: Tensor, block: str, letter: str) -> Tensor:
        return x @ self.t[f"{block}_W{letter}"] + self.t[f"{block}_b{letter}"]

    def attention(self, x: Tensor, y: Tensor, layer: str, part: str, causal: bool) -> Tensor:
        if part == "self" and f"{layer}_rnn_W" in self.t:
            return self.recur(x, f"{layer}_rnn")
        block = f"{layer}_{'self' if part == 'self' else 'context'}"
        q, k, v = self.dense(x, block, "q"), self.dense(y, block, "k"), self.dense(y, block, "v")
        return self.dense(attend(q, k, v, HEADS, causal), block, "o")

    def feed(self, x: Tensor, layer: str) -> Tensor:
        return self.dense(ACTIVATIONS[self.how["activation"]](self.dense(x, f"{layer}_ffn", "1")), f"{layer}_ffn", "2")
