"""Small files of the tutorials' formats, beside what their code computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.run import import_checkpoint

from .plain_models import ANNOTATED, FC, LINEARS, MULTI30K, PACKED, SEQ2SEQ, TORCH, PlainModel, random_state, sines

LIMIT = 1e-4
POSITIONS = 30


@dataclass
class Case:
    """A format, a file of it, and what its code computes."""

    format: str
    make: Callable[[], tuple[dict[str, Tensor], PlainModel]]
    options: dict[str, Any] = field(default_factory=dict)


def annotated(**how: Any) -> tuple[dict[str, Tensor], PlainModel]:
    """As published: norms of its own, pre-norm, a table of positions in the file."""
    state = random_state(ANNOTATED, LINEARS, ("a_2", "b_2"))
    table = published_sines(POSITIONS, 32)
    plain = dict(state)
    if how.pop("one_attention", False):
        state = {name: tensor for name, tensor in state.items() if "src_attn" not in name}
        plain = {
            **state,
            **{k.replace("self_attn", "src_attn"): v for k, v in state.items() if k.startswith("decoder")},
        }
    if base := how.pop("base", None):
        table = sines(POSITIONS, 32, base)
    if how.pop("shared", False):
        state["src_embed.0.lut.weight"] = plain["src_embed.0.lut.weight"] = state["tgt_embed.0.lut.weight"]
        state["generator.proj.weight"] = plain["generator.proj.weight"] = state["tgt_embed.0.lut.weight"]
    stored = {**state, **{f"{side}_embed.1.pe": table[None] for side in ("src", "tgt")}}
    model = PlainModel(plain, 4, ANNOTATED, LINEARS, 2, annotated=True, eps=1e-6, positions=(table, table))
    return stored, model


def published_sines(count: int, width: int) -> Tensor:
    """In float32 and by powers of e, which differs in last digits from other ways."""
    table, position = torch.zeros(count, width), torch.arange(count).unsqueeze(1)
    rates = torch.exp(torch.arange(0, width, 2) * -(math.log(10000.0) / width))
    table[:, 0::2], table[:, 1::2] = torch.sin(position * rates), torch.cos(position * rates)
    return table


def plain_norms() -> tuple[dict[str, Tensor], PlainModel]:
    """torch's LayerNorm instead, no table in the file, words not scaled."""
    state = random_state(ANNOTATED, LINEARS, embeddings=6.0)
    return state, PlainModel(state, 4, ANNOTATED, LINEARS, 2, scaled=False)


def multi30k() -> tuple[dict[str, Tensor], PlainModel]:
    state = random_state(MULTI30K, LINEARS, ("a_2", "b_2"), embeddings=6.0)
    table = sines(POSITIONS, 32)
    stored = {**state, **{f"{side}.emb.pos_emb.pe": table[None] for side in ("encoder", "decoder")}}
    return stored, PlainModel(state, 4, MULTI30K, LINEARS, 2, scaled=False, annotated=True, eps=1e-6)


def seq2seq() -> tuple[dict[str, Tensor], PlainModel]:
    state = random_state(SEQ2SEQ, FC)
    tables = tuple(torch.randn(POSITIONS, 32, generator=torch.Generator().manual_seed(i)) for i in (5, 6))
    stored = {**state, **{f"{s}.pos_embedding.weight": t for s, t in zip(("encoder", "decoder"), tables, strict=True)}}
    return stored, PlainModel(state, 4, SEQ2SEQ, FC, 2, pre=False, positions=(tables[0], tables[1]))


def without_positions() -> tuple[dict[str, Tensor], PlainModel]:
    """torch.nn.Transformer between embeddings without positions, with an activation that is not its default."""
    state, zeros = random_state(TORCH, PACKED), torch.zeros(POSITIONS, 32)
    return state, PlainModel(state, 4, TORCH, PACKED, 2, pre=False, activation=F.silu, positions=(zeros, zeros))


def of_torch(pre: bool, gelu: bool, biases: bool, final: bool) -> tuple[dict[str, Tensor], PlainModel]:
    names = TORCH if final else {**TORCH, "decoder_norm": ""}
    state = random_state(names, PACKED, biases=biases)
    table = torch.randn(POSITIONS, 1, 32, generator=torch.Generator().manual_seed(7))
    model = PlainModel(
        state,
        4,
        names,
        PACKED,
        2,
        pre=pre,
        activation=F.gelu if gelu else torch.relu,
        positions=(table[:, 0], table[:, 0]),
    )
    return {**state, "positional_encoding.pos_embedding": table}, model


CASES = {
    "annotated": Case("annotated", annotated),
    "annotated, base 1000": Case("annotated", lambda: annotated(base=1000.0)),
    "annotated, one attention for both": Case("annotated", lambda: annotated(one_attention=True)),
    "annotated, other norms and embeddings": Case(
        "annotated", plain_norms, {"model": {"scale_embeddings": False, "max_positions": POSITIONS}}
    ),
    "multi30k-tutorial": Case("multi30k-tutorial", multi30k),
    "pytorch-seq2seq": Case("pytorch-seq2seq", seq2seq),
    "torch, no positions, silu": Case(
        "torch", without_positions, {"model": {"positions": "none", "max_positions": POSITIONS, "activation": "silu"}}
    ),
    **{
        f"torch, {pre=}, {gelu=}, {biases=}, {final=}": Case(
            "torch",
            lambda how=(pre, gelu, biases, final): of_torch(*how),  # type: ignore[misc]
            {"model": {"norm_position": "pre" if pre else "post", "activation": "gelu" if gelu else "relu"}},
        )
        for pre, gelu, biases, final in [
            (False, False, True, True),
            (True, True, True, True),
            (True, False, False, True),
            (False, True, True, False),
        ]
    },
}


def write_words(path: Path, count: int, specials: tuple[str, ...] = ("<unk>", "<pad>", "<bos>", "<eos>")) -> Path:
    path.write_text("\n".join([*specials, *(f"w{i}" for i in range(len(specials), count))]) + "\n", encoding="utf-8")
    return path


def imported(case: Case, folder: Path) -> tuple[Path, PlainModel]:
    """A run folder of a case, by the command's own function."""
    folder.mkdir(exist_ok=True)
    stored, model = case.make()
    torch.save(stored, folder / "model.pt")
    vocabularies = {"src_vocab": write_words(folder / "src", 40), "tgt_vocab": write_words(folder / "tgt", 44)}
    options = ImportOptions(heads=4, **vocabularies, **case.options)
    import_checkpoint(case.format, folder / "model.pt", folder / "run", options)
    return folder / "run", model
