"""Modules of users as tutorials write them, which `UserModel` wraps, and the module's own loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration, MarianConfig, MarianMTModel

from tformer_deploy import UserModel
from tformer_deploy.decoding import DecodeOptions, decode
from tformer_deploy.engines.base import Engine, Limits

from .plain_decoding import EOS, Sentence, make_batch

VOCAB, D, POSITIONS, PAD, START = 30, 16, 12, 1, 2
IDS = {
    "src_vocab": VOCAB,
    "tgt_vocab": VOCAB,
    "max_positions": POSITIONS,
    "pad_id": PAD,
    "start_id": START,
    "eos_id": EOS,
}
Make = Callable[[], UserModel]


class Tutorial(nn.Module):
    """`nn.Transformer` between embeddings, learned positions and an output, as tutorials have it."""

    def __init__(self, batch_first: bool = True, layers: int = 1) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(POSITIONS, D)
        self.transformer = nn.Transformer(D, 4, 1, layers, 24, batch_first=batch_first)
        self.output, self.batch_first = nn.Linear(D, VOCAB), batch_first

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        return x if self.batch_first else x.transpose(0, 1)

    def forward(self, src: Tensor, tgt: Tensor, padding: Tensor) -> Tensor:
        return self.decode(self.encode(src, padding), tgt, padding)

    def encode(self, src: Tensor, padding: Tensor) -> Tensor:
        memory: Tensor = self.transformer.encoder(self.embed(src), src_key_padding_mask=padding)
        return memory if self.batch_first else memory.transpose(0, 1)

    def decode(self, memory: Tensor, tgt: Tensor, padding: Tensor) -> Tensor:
        memory = memory if self.batch_first else memory.transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        x = self.transformer.decoder(
            self.embed(tgt), memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding
        )
        found: Tensor = self.output(x if self.batch_first else x.transpose(0, 1))
        return found


class Heads(nn.Module):
    """Attention called with query, key, value and mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        pairs = zip(self.linears, (query, key, value), strict=False)
        q, k, v = (linear(x).view(x.shape[0], -1, 4, D // 4).transpose(1, 2) for linear, x in pairs)
        scores = q @ k.transpose(2, 3) / math.sqrt(D // 4)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -1e9)
        x = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.linears[3](x)  # type: ignore[no-any-return]


class Sublayers(nn.Module):
    """A layer as The Annotated Transformer has it: norms first, masks as arguments."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.self_attn, self.src_attn = Heads(), Heads() if cross else None
        self.feed_forward = nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, D))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor | None, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.self_attn(y, y, y, tgt_mask)
        if self.src_attn is not None:
            x = x + self.src_attn(self.norms[1](x), memory, memory, src_mask)
        return x + self.feed_forward(self.norms[2](x))  # type: ignore[no-any-return]


class Annotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(VOCAB, D), nn.Embedding(VOCAB, D)
        self.encoder, self.decoder = Sublayers(cross=False), nn.ModuleList(Sublayers(cross=True) for _ in range(2))
        self.encoder_norm, self.decoder_norm, self.generator = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, VOCAB)
        places = torch.arange(POSITIONS)[:, None] * 0.5 ** torch.arange(D)
        self.register_buffer("pe", places.sin()[None], persistent=False)

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        x = self.src_embed(src) * 4 + self.pe[:, : src.shape[1]]  # type: ignore[index]
        memory = self.encoder_norm(self.encoder(x, None, src_mask, src_mask))
        x = self.tgt_embed(tgt) * 4 + self.pe[:, : tgt.shape[1]]  # type: ignore[index]
        for layer in self.decoder:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.generator(self.decoder_norm(x))  # type: ignore[no-any-return]


def varied(module: nn.Module) -> nn.Module:
    """Weights so large that outputs differ."""
    generator = torch.Generator().manual_seed(6)
    for name, parameter in module.named_parameters():
        scale = 0.5 if "embed" in name or "shared" in name else 0.6 if parameter.dim() > 1 else 0.2
        parameter.data += torch.empty_like(parameter).normal_(0, scale, generator=generator)
    return module


def tutorial(hooks: bool = False, **changes: Any) -> UserModel:
    """By `forward` alone, or with hooks."""
    torch.manual_seed(1)
    how: dict[str, Any] = {"forward": lambda m, src, mask, tgt: m(src, tgt, ~mask)}
    if hooks:
        how = {
            "encode": lambda m, src, mask: m.encode(src, ~mask),
            "decode": lambda m, memory, mask, tgt: m.decode(memory, tgt, ~mask),
            **{"layers": "transformer.decoder.layers", "self_attention": "self_attn"},
        }
    module = varied(Tutorial(layers=2 if hooks else 1))
    return UserModel(**{"module": module, **IDS, **how, **changes})  # type: ignore[arg-type]


def time_first() -> UserModel:
    """Hidden states of (T, B, d)."""
    return tutorial(hooks=True, module=varied(Tutorial(batch_first=False)))


def annotated(hooks: bool = False) -> UserModel:
    def forward(module: Any, src: Tensor, mask: Tensor, tgt: Tensor) -> Tensor:
        causal = torch.ones(1, tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        return module(src, tgt, mask[:, None], causal)  # type: ignore[no-any-return]

    torch.manual_seed(2)
    names = {"layers": "decoder", "self_attention": "self_attn"} if hooks else {}
    return UserModel(varied(Annotated()), **IDS, forward=forward, **names)  # type: ignore[arg-type]


def hugging_face(kind: str, hooks: bool = False) -> UserModel:
    make, config = {"marian": (MarianMTModel, MarianConfig), "bart": (BartForConditionalGeneration, BartConfig)}[kind]
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 24))}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": D, "vocab_size": VOCAB}
    ids = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": EOS, "decoder_start_token_id": START}
    torch.manual_seed(3)
    module = make(config(**sizes, **ids, max_position_embeddings=POSITIONS, forced_eos_token_id=None))  # type: ignore[arg-type]
    names = {"layers": "model.decoder.layers", "self_attention": "self_attn"} if hooks else {}
    return UserModel(
        varied(module),
        **IDS,  # type: ignore[arg-type]
        encode=lambda m, src, mask: m.get_encoder()(input_ids=src, attention_mask=mask.long()).last_hidden_state,
        decode=lambda m, memory, mask, tgt: (
            m(encoder_outputs=(memory,), attention_mask=mask.long(), decoder_input_ids=tgt, use_cache=False).logits
        ),
        **names,
    )


MODELS: dict[str, Make] = {
    "tutorial": tutorial,
    "tutorial, hooks": lambda: tutorial(hooks=True),
    "(T, B, d), hooks": time_first,
    "annotated": annotated,
    "annotated, hooks": lambda: annotated(hooks=True),
    "marian": lambda: hugging_face("marian"),
    "marian, hooks": lambda: hugging_face("marian", hooks=True),
    "bart": lambda: hugging_face("bart"),
    "bart, hooks": lambda: hugging_face("bart", hooks=True),
}


class Own:
    """The user's functions for one sentence, without padding and caches; what `plain_decoding.Sentence` asks."""

    def __init__(self, user: UserModel) -> None:
        self.user, self.limits = user, Limits(8, POSITIONS, POSITIONS, 8)
        user.module.eval()

    @torch.inference_mode()
    def log_probs(self, source: tuple[int, ...], output: tuple[int, ...]) -> np.ndarray:
        user, src, tgt = self.user, torch.tensor([source]), torch.tensor([[START, *output]])
        mask = torch.ones_like(src, dtype=torch.bool)
        if user.forward is not None:
            logits = user.forward(user.module, src, mask, tgt)
        else:
            assert user.encode is not None and user.decode is not None
            logits = user.decode(user.module, user.encode(user.module, src, mask), mask, tgt)
        found: np.ndarray = logits[0, -1].log_softmax(-1).numpy()
        return found

    def looks(self, source: tuple[int, ...], output: tuple[int, ...]) -> np.ndarray:
        return np.zeros(len(source))

    def greedy(self, source: tuple[int, ...], most: int) -> list[int]:
        output: list[int] = []
        while len(output) < most:
            token = int(self.log_probs(source, tuple(output)).argmax())
            if token == EOS:
                break
            output.append(token)
        return output


def sources() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(3)
    return [(*rng.integers(5, VOCAB, size).tolist(), EOS) for size in (9, 1, 4, 11, 6)]


def require_own_tokens(engine: Engine, user: UserModel) -> None:
    """Greedy in a batch and alone, and a beam, are those of plain loops over the user's functions."""
    own = Own(user)
    expected = [own.greedy(source, POSITIONS) for source in sources()]
    assert len({tuple(ids) for ids in expected}) > 2
    options = DecodeOptions(max_tokens=POSITIONS)
    assert [found[0].ids for found in decode(engine, make_batch(sources()), options)] == expected
    for source, ids in list(zip(sources(), expected, strict=True))[:2]:
        assert decode(engine, make_batch([source]), options)[0][0].ids == ids
    beam = DecodeOptions(max_tokens=6, beams=3, n_best=3)
    for source, found in zip(sources(), decode(engine, make_batch(sources()), beam), strict=True):
        wanted = Sentence(own, source, beam).beam()  # type: ignore[arg-type]
        assert [each.ids for each in found] == [list(each.ids) for each in wanted]
        assert np.allclose([each.value for each in found], [each.value for each in wanted], atol=1e-4)
