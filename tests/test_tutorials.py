"""`nn.Transformer` as tutorials have it: `forward(src, tgt)` without a hint on masks, exported as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import transformer as torch_layers

from tformer_deploy import UserModel
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.engines import make_engine
from tformer_deploy.export.checked import export_checked
from tformer_deploy.export.trace import masks_as_given
from tformer_deploy.model.modules.recompute import plain_attention

from .user_models import IDS, PAD, POSITIONS, VOCAB, D, require_own_tokens, varied

Square = nn.Transformer.generate_square_subsequent_mask


class Whole(nn.Module):
    """Masks made of the ids; `masks` are the arguments of `nn.Transformer`."""

    def __init__(self, masks: Callable[[Tensor, Tensor], dict[str, Any]], batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.source, self.target, self.masks = nn.Embedding(VOCAB, D), nn.Embedding(VOCAB, D), masks
        self.transformer = nn.Transformer(D, 4, 1, 1, 24, batch_first=batch_first)
        self.output, self.batch_first = nn.Linear(D, VOCAB), batch_first
        places = torch.arange(POSITIONS)[:, None] * 0.5 ** torch.arange(D)
        self.register_buffer("pe", places.sin())

    def embed(self, table: nn.Module, ids: Tensor) -> Tensor:
        x = table(ids) * math.sqrt(D) + self.pe[: ids.size(1)]  # type: ignore[index]
        return x if self.batch_first else x.transpose(0, 1)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        x = self.transformer(self.embed(self.source, src), self.embed(self.target, tgt), **self.masks(src, tgt))
        return self.output(x if self.batch_first else x.transpose(0, 1))  # type: ignore[no-any-return]


class Parts(Whole):
    """Encoder and decoder called one after the other, or built of stacks of their own."""

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        how = self.masks(src, tgt)
        memory = self.transformer.encoder(
            self.embed(self.source, src), how.get("src_mask"), how["src_key_padding_mask"], how.get("src_is_causal")
        )
        x = self.transformer.decoder(
            self.embed(self.target, tgt),
            memory,
            tgt_mask=how["tgt_mask"],
            memory_key_padding_mask=how["memory_key_padding_mask"],
        )
        return self.output(x)  # type: ignore[no-any-return]


def padding(src: Tensor) -> dict[str, Tensor]:
    return {"src_key_padding_mask": src == PAD, "memory_key_padding_mask": src == PAD}


def floats(src: Tensor, tgt: Tensor) -> dict[str, Any]:
    """As the documentation of `nn.Transformer` has it."""
    return {"tgt_mask": Square(tgt.size(1)), **padding(src)}


def official(src: Tensor, tgt: Tensor) -> dict[str, Any]:
    """PyTorch's own tutorial of translation: masks for all four, by triu."""
    size = tgt.shape[1]
    mask = (torch.triu(torch.ones((size, size))) == 1).transpose(0, 1)
    causal = mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)
    free = torch.zeros((src.shape[1], src.shape[1])).type(torch.bool)
    return {"src_mask": free, "tgt_mask": causal, "tgt_key_padding_mask": tgt == PAD, **padding(src)}


def booleans(src: Tensor, tgt: Tensor) -> dict[str, Any]:
    size = tgt.size(1)
    return {"tgt_mask": torch.triu(torch.ones(size, size, dtype=torch.bool), diagonal=1), **padding(src)}


def of_each_head(src: Tensor, tgt: Tensor) -> dict[str, Any]:
    """A mask of (B*H, T, T)."""
    batch, size = tgt.shape
    return {"tgt_mask": Square(size).expand(batch * 4, size, size), **padding(src)}


def looks_back(src: Tensor, tgt: Tensor) -> dict[str, Any]:
    """An encoder that is causal too."""
    return {"src_mask": Square(src.size(1)), **floats(src, tgt)}


def said(src: Tensor, tgt: Tensor) -> dict[str, Any]:
    return {"tgt_is_causal": True, "src_is_causal": False, **official(src, tgt)}


TUTORIALS: dict[str, Callable[[], nn.Module]] = {
    "floats": lambda: Whole(floats),
    "(T, B, d)": lambda: Whole(floats, batch_first=False),
    "official": lambda: Whole(official),
    "booleans": lambda: Whole(booleans),
    "a mask of each head": lambda: Whole(of_each_head),
    "a causal encoder": lambda: Whole(looks_back),
    "said": lambda: Whole(said),
    "parts": lambda: Parts(official),
    "parts, booleans": lambda: Parts(booleans),
    "parts, causal": lambda: Parts(looks_back),
}


def tutorial(name: str) -> UserModel:
    return UserModel(varied(TUTORIALS[name]()), **IDS, forward=lambda m, src, mask, tgt: m(src, tgt))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_is_exported_as_it_is(name: str, tmp_path: Path) -> None:
    """And gives what plain loops over the module give."""
    (tmp_path / "my_file.py").write_text(
        f"from tests.test_tutorials import tutorial\n\n\ndef make():\n    return tutorial({name!r})\n"
    )
    export_checked(tmp_path / "my_file.py:make", tmp_path / "bundle")
    with make_engine("ort", open_bundle(tmp_path / "bundle"), threads=1) as engine:
        require_own_tokens(engine, tutorial(name))


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_is_applied_and_not_looked_at(causal: bool) -> None:
    """By PyTorch's encoder and decoder, for any size, with the numbers that they have where they look."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 24, batch_first=True), 1)
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 4, 24, batch_first=True), 1)

        def forward(self, x: Tensor) -> Tensor:
            mask = Square(x.shape[1]) if causal else torch.zeros(x.shape[1], x.shape[1])
            return self.decoder(x, self.encoder(x, mask), mask)  # type: ignore[no-any-return]

    torch.manual_seed(1)
    model, before = Both().eval(), torch_layers._detect_is_causal_mask
    with torch.no_grad(), masks_as_given(), plain_attention():
        found = torch.export.export(model, (torch.randn(2, 5, D),), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    assert torch_layers._detect_is_causal_mask is before
    for size in (5, 9):
        x = torch.randn(2, size, D)
        with torch.no_grad():
            assert (found.module()(x) - model(x)).abs().max() < 1e-5
