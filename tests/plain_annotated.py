"""The model and the copy task of the published notebook The Annotated Transformer, written anew with its names.

Source: Rush et al., harvardnlp/annotated-transformer: pre-norm, a norm of its own, Noam's rate, Xavier's weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

V = 11
"""Ids 1 to 10 are copied, 0 is padding. Every sequence begins with 1, which is a number like others."""


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


class Attention(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.linears = heads, nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, source: Tensor, mask: Tensor) -> Tensor:
        inputs = zip(self.linears, (x, source, source), strict=False)
        q, k, v = (linear(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear, y in inputs)
        scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).masked_fill(mask == 0, -1e9)
        return self.linears[3]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.w_1(x).relu())  # type: ignore[no-any-return]


class Sublayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)


class Layer(nn.Module):
    def __init__(self, heads: int, width: int, inner: int, crosses: bool) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = Attention(heads, width), FeedForward(width, inner)
        if crosses:
            self.src_attn = Attention(heads, width)
        self.sublayer = nn.ModuleList(Sublayer(width) for _ in range(2 + crosses))

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, src_mask: Tensor | None = None) -> Tensor:
        y = self.sublayer[0].norm(x)
        x = x + self.self_attn(y, y, mask)
        if memory is not None:
            x = x + self.src_attn(self.sublayer[1].norm(x), memory, src_mask)
        return x + self.feed_forward(self.sublayer[-1].norm(x))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, layers: list[Layer], width: int) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), Norm(width)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *others)
        return self.norm(x)  # type: ignore[no-any-return]


class Embeddings(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(V, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lut(ids) * math.sqrt(self.lut.embedding_dim)  # type: ignore[no-any-return]


class Positions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        place = torch.arange(5000).unsqueeze(1) * torch.exp(torch.arange(0, width, 2) * -(math.log(10000.0) / width))
        self.register_buffer("pe", torch.stack((place.sin(), place.cos()), 2).flatten(1)[None])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pe[:, : x.shape[1]]  # type: ignore[index,no-any-return]


class Generator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, V)


class Copying(nn.Module):
    """The notebook's `make_model(V, V, N)`, without dropout, which the task does not need."""

    def __init__(self, layers: int = 2, width: int = 64, inner: int = 128, heads: int = 8) -> None:
        super().__init__()
        sides = [[Layer(heads, width, inner, crosses) for _ in range(layers)] for crosses in (False, True)]
        self.encoder, self.decoder = (Stack(side, width) for side in sides)
        self.src_embed, self.tgt_embed = (nn.Sequential(Embeddings(width), Positions(width)) for _ in range(2))
        self.generator = Generator(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Log-probabilities (B, T, V) of what follows each of tgt (B, T)."""
        mask = (src != 0)[:, None, None]
        causal = torch.ones(tgt.shape[1], tgt.shape[1]).tril()
        memory = self.encoder(self.src_embed(src), mask)
        hidden = self.decoder(self.tgt_embed(tgt), causal, memory, mask)
        return self.generator.proj(hidden).log_softmax(-1)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def greedy(self, src: Tensor, length: int) -> list[int]:
        """Its `greedy_decode`: a sequence of that length, which begins with 1."""
        found = torch.ones(1, 1, dtype=torch.long)
        while found.shape[1] < length:
            found = torch.cat((found, self(src, found)[:, -1].argmax(-1)[None]), 1)
        return found[0].tolist()  # type: ignore[no-any-return]


def train_to_copy(updates: int, seed: int = 1) -> Copying:
    """Batches of 80 random sequences of 10, and the rate of 400 steps of warm-up, as published."""
    torch.manual_seed(seed)
    model = Copying()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.9, 0.98), eps=1e-9)
    width = model.src_embed[0].lut.embedding_dim  # type: ignore[union-attr]
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: width**-0.5 * min(max(step, 1) ** -0.5, max(step, 1) * 400**-1.5)
    )
    for _ in range(updates):
        data = torch.randint(1, V, (80, 10))
        data[:, 0] = 1
        loss = -model(data, data[:, :-1]).gather(2, data[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
    return model.eval()
