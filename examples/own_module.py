"""A module of your own: `make` says how to call it; nothing else is needed. docs/your-model.md explains every argument.

tformer export examples/own_module.py:make --out bundle
echo 'a dog runs' | tformer translate bundle
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tformer_deploy

TEXT = "a the dog cat bird runs sleeps sings ein der Hund Vogel läuft singt"
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *TEXT.split()]
PAD, START, END, UNK = range(4)
LONGEST = 16


class Translation(nn.Module):
    """`nn.Transformer` between two embeddings and an output."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(len(WORDS), width), nn.Embedding(len(WORDS), width)
        self.positions = nn.Embedding(LONGEST, width)
        self.transformer = nn.Transformer(width, 4, 1, 2, dim_feedforward=64, batch_first=True)
        self.output = nn.Linear(width, len(WORDS))

    def embed(self, table: nn.Embedding, ids: Tensor) -> Tensor:
        """(B, length) → (B, length, width)."""
        return table(ids) + self.positions(torch.arange(ids.shape[1]))  # type: ignore[no-any-return]

    def forward(self, src: Tensor, padding: Tensor, tgt: Tensor) -> Tensor:
        """Source (B, S), true where it is padding (B, S), target so far (B, T) → logits (B, T, words)."""
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        embedded = self.embed(self.source, src), self.embed(self.target, tgt)
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_mask": causal}
        return self.output(self.transformer(*embedded, **masks))  # type: ignore[no-any-return]


def make() -> tformer_deploy.UserModel:
    """What `tformer export` calls."""
    torch.manual_seed(1)  # random weights; yours: module.load_state_dict(torch.load("model.pt"))
    return tformer_deploy.UserModel(
        Translation(),
        src_vocab=len(WORDS),
        tgt_vocab=len(WORDS),
        max_positions=LONGEST,
        pad_id=PAD,
        start_id=START,
        eos_id=END,
        unk_id=UNK,
        source=WORDS,
        target=WORDS,
        forward=lambda module, src_ids, src_mask, tgt_ids: module(src_ids, ~src_mask, tgt_ids),
    )
