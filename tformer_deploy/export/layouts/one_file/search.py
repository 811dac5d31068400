"""The search of a file that generates by itself, in PyTorch: parts that are traced to graphs and joined by `joining`.

The rules are those of docs/decoding.md, for all sentences at once; `tformer_deploy.decoding` has them one by one. A
sentence that has ended stays among the others until the file drops it.

B sentences, R rows of a sentence in a step (1 at the first), K beams, E end tokens, C candidates of a row, M of a
sentence, V vocabulary, t tokens so far, F forced tokens.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ....decoding import DecodeOptions
from ....model.config import ModelConfig
from ...trace import Named

Shape = tuple[int | str, ...]
INT, FLOAT, DOUBLE, BOOL = torch.int32, torch.float32, torch.float64, torch.bool
Specs = dict[str, tuple[torch.dtype, Shape]]

ROWS: Specs = {
    "tokens": (INT, ("batch", "rows")),
    "parents": (INT, ("batch", "rows")),
    "values": (DOUBLE, ("batch", "rows")),
    "scores": (DOUBLE, ("batch", "rows")),
    "written": (INT, ("batch", "rows", "length")),
}
"""Live hypotheses: what the next step is fed, whose rows they continue, sums after the rules and plain, outputs."""
KEPT: Specs = {
    "kept_ids": (INT, ("batch", "beams", "length")),
    "kept_lengths": (INT, ("batch", "beams")),
    "kept_finished": (INT, ("batch", "beams")),
    "kept_scores": (DOUBLE, ("batch", "beams")),
    "kept_values": (DOUBLE, ("batch", "beams")),
}
"""The best outputs that have ended, best first; a place without one has the value -inf."""
OTHERS: Specs = {"position": (INT, (1,)), "ended": (INT, ("batch",)), "active": (BOOL, ("batch",))}
"""Steps so far; of each sentence, how many outputs have ended, and whether it goes on."""
STATE: Specs = {**ROWS, **KEPT, **OTHERS}
SENTENCES: Specs = {
    "longest": (INT, ("batch",)),
    "shortest": (INT, ("batch",)),
    "forced": (INT, ("batch", "forced")),
}
"""What a search has of each sentence: limits, and forced tokens, at least one column; -1: none."""
VOCABULARY: Specs = {"ends": (BOOL, ("vocab",)), "banned": (BOOL, ("vocab",))}
"""Which tokens end an output, and which are never produced."""
BEST: Specs = {
    "top_ids": (INT, ("batch", "rows", "best")),
    "ruled": (FLOAT, ("batch", "rows", "best")),
    "plain": (FLOAT, ("batch", "rows", "best")),
}
"""The best candidates of each row, log-probabilities after the rules and before."""
INPUTS: Specs = {
    "src_ids": (INT, ("batch", "src_len")),
    "src_lengths": (INT, ("batch",)),
    "beams": (INT, (1,)),
    "n_best": (INT, (1,)),
    "max_tokens": (INT, ("batch",)),
    "min_tokens": (INT, ("batch",)),
    "length_penalty": (DOUBLE, (1,)),
    "repetition_penalty": (FLOAT, (1,)),
    "no_repeat_ngram": (INT, (1,)),
    "suppress": (INT, ("suppressed",)),
    "bad_words": (INT, ("bad_words", "bad_length")),
    "first_ids": (INT, ("batch", "first_ids")),
}
"""Of the whole graph. -1 stands for no token: on the left of `bad_words`, on the right of the others."""
PER_SENTENCE = ("max_tokens", "min_tokens", "first_ids")
"""Inputs of which one row may stand for all sentences."""
LOGS: Specs = {"log_probs": (FLOAT, ("batch", "rows", "vocab"))}
SIZES = {"batch": 2, "rows": 3, "beams": 4, "length": 5, "forced": 6, "best": 7, "src_len": 8, "suppressed": 9}
SIZES |= {"bad_words": 10, "bad_length": 11, "first_ids": 12}
"""To trace with."""


def some(specs: Specs, *names: str) -> Specs:
    """Those of some names."""
    return {name: specs[name] for name in names}


class Part(Named):
    """A part of the search, traced alone."""

    inputs: ClassVar[Specs]
    outputs: tuple[str, ...]

    def __init__(self, config: ModelConfig, options: DecodeOptions) -> None:
        super().__init__()
        self.config, self.options, self.name = config, options, type(self).__name__.lower()
        self.ends = options.ends(config.eos_id)

    def given(self) -> dict[str, tuple[Tensor, Shape]]:
        """Examples of all inputs, with their shapes."""
        sizes = {**SIZES, "vocab": self.config.tgt_vocab}
        found = {}
        for name, (dtype, shape) in self.inputs.items():
            sized = [size if isinstance(size, int) else sizes[size] for size in shape]
            known = tuple(self.config.tgt_vocab if size == "vocab" else size for size in shape)
            found[name] = torch.ones(sized, dtype=dtype), known
        return found

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`inputs` in order -> `outputs` in order."""
        found = self.compute(dict(zip(self.inputs, inputs, strict=True)))
        return tuple(found[name] for name in self.outputs)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same by names."""
        raise NotImplementedError


class Start(Part):
    """The inputs as tables and limits, and the first state."""

    inputs: ClassVar[Specs] = {
        **some(INPUTS, "src_lengths", "max_tokens", "min_tokens", "suppress", "bad_words", "first_ids"),
        **some(INPUTS, "repetition_penalty"),
        "places": (FLOAT, ("beams",)),
    }
    outputs = (*STATE, *SENTENCES, *VOCABULARY, "always")

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Part.compute`. `places`: K zeros; `always`: whether a rule changes every step."""
        batch, vocab = given["src_lengths"].shape[0], self.config.tgt_vocab
        lengths, suppress = given["src_lengths"].double(), given["suppress"]
        longest = given["max_tokens"].clamp(max=self.config.max_positions)
        if self.options.max_ratio:
            longest = torch.minimum(self.options.max_ratio * lengths, longest.double()).int()
        longest = longest.clamp(min=1)
        shortest = given["min_tokens"]
        if self.options.min_ratio:
            least = torch.minimum(self.options.min_ratio * lengths, longest.double()).int()
            shortest = torch.maximum(shortest, least)
        ends = torch.zeros(vocab, dtype=INT)
        ends[list(self.ends)] = 1
        place = torch.where(suppress >= 0, suppress, vocab).long()
        banned = torch.zeros(vocab + 1, dtype=INT).scatter(0, place, torch.ones_like(suppress))[:vocab]
        words = (suppress >= 0).sum() + (given["bad_words"] >= 0).sum()
        return {
            **self.state(batch, given["places"].expand(batch, -1)),
            "longest": longest,
            "shortest": torch.minimum(shortest, longest),
            "forced": torch.cat((given["first_ids"], torch.full((batch, 1), -1, dtype=INT)), 1),
            "ends": ends > 0,
            "banned": banned > 0,
            "always": (words > 0) | (given["repetition_penalty"] != 1),
        }

    def state(self, batch: int, places: Tensor) -> dict[str, Tensor]:
        """One row a sentence, and no output."""
        return {
            "tokens": torch.full((batch, 1), self.config.start_id, dtype=INT),
            "parents": torch.arange(batch, dtype=INT)[:, None],
            "values": torch.zeros(batch, 1, dtype=DOUBLE),
            "scores": torch.zeros(batch, 1, dtype=DOUBLE),
            "written": torch.zeros(batch, 1, 0, dtype=INT),
            "kept_ids": places[:, :, None].int()[:, :, :0],
            "kept_lengths": places.int(),
            "kept_finished": places.int(),
            "kept_scores": places.double(),
            "kept_values": places.double() - torch.inf,
            "position": torch.zeros(1, dtype=INT),
            "ended": torch.zeros(batch, dtype=INT),
            "active": torch.ones(batch, dtype=BOOL),
        }


class Needed(Part):
    """Whether a rule changes log-probabilities at this step."""

    inputs: ClassVar[Specs] = {
        **some(STATE, "position"),
        **SENTENCES,
        **some(INPUTS, "no_repeat_ngram"),
        "always": (BOOL, (1,)),
    }
    outputs = ("needed",)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Part.compute`."""
        after, ngram = given["position"] + 1, given["no_repeat_ngram"]
        early = given["shortest"].amax(0) > after
        # The last column of `forced` is empty.
        forced = given["position"] + 1 < (given["forced"] >= -1).sum(1).amax(0)
        needed = given["always"] | early | forced | ((ngram > 0) & (ngram <= after))
        if self.options.forced_end:
            needed = needed | (given["longest"].amin(0) <= after)
        return {"needed": needed.reshape(())}


class Best(Part):
    """The best candidates where no rule changes anything."""

    inputs: ClassVar[Specs] = {**LOGS, **some(STATE, "kept_values")}
    outputs = tuple(BEST)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Part.compute`. Of a row, K that do not end and all that do are enough."""
        best, ids = given["log_probs"].topk(given["kept_values"].shape[1] + len(self.ends), dim=-1)
        return {"top_ids": ids.int(), "ruled": best, "plain": best}


class Ruled(Part):
    """The best candidates after all rules, in the order of docs/decoding.md."""

    inputs: ClassVar[Specs] = {
        **Best.inputs,
        **some(STATE, "written", "position"),
        **SENTENCES,
        **VOCABULARY,
        **some(INPUTS, "repetition_penalty", "no_repeat_ngram", "bad_words"),
    }
    outputs = tuple(BEST)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Part.compute`."""
        plain, written = given["log_probs"], given["written"].long()
        after = given["position"] + 1
        never = torch.full((), -torch.inf)
        ruled = plain.scatter(2, written, plain.gather(2, written) * given["repetition_penalty"])
        early = (given["shortest"] > after)[:, None, None]
        ruled = torch.where(given["banned"] | (given["ends"] & early), never, ruled)
        for tokens, forbidden in (repeated(written, given["no_repeat_ngram"]), bad(written, given["bad_words"])):
            limit = torch.where(forbidden, -torch.inf, torch.inf)
            ruled = ruled.scatter_reduce(2, tokens, limit, "amin")
        place = torch.minimum(given["position"], given["forced"].new_full((1,), given["forced"].shape[1] - 1))
        token = given["forced"].index_select(1, place)[:, :, None]
        is_token = torch.arange(self.config.tgt_vocab, dtype=INT) == token
        kept = plain
        if self.options.first_adds_zero:
            is_first = given["position"] < len(self.options.first_ids)
            kept = torch.where(is_first, torch.zeros(()), plain)
        ruled = torch.where(token >= 0, torch.where(is_token, kept, never), ruled)
        if self.options.forced_end and self.ends:
            last = (given["longest"] == after)[:, None, None]
            ruled = torch.where(last, torch.where(given["ends"], torch.zeros(()), never), ruled)
        best, ids = ruled.topk(given["kept_values"].shape[1] + len(self.ends), dim=-1)
        return {"top_ids": ids.int(), "ruled": best, "plain": plain.gather(2, ids)}


def repeated(written: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of outputs (B, R, t), and whether each would complete an n-gram of `size` that its output has."""
    length = written.shape[2]
    behind = torch.arange(length)
    last = written.flip(2)  # from the last token backwards
    # [j, d]: the j-th token from the end, and the one d + 1 places before it
    other = behind[:, None] + behind[None, :] + 1
    there = other < length
    found = last.index_select(2, torch.where(there, other, 0).flatten()).view(*written.shape, length)
    same = (found == last[:, :, :, None]) & there
    # Counted, as the least of no numbers is undefined.
    differ = (~same & (behind[:, None] < size - 1)).sum(2)
    return last, (differ == 0) & (size > 0)


def bad(written: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """The last tokens of sequences (N, W), padded with -1 on the left, and after which outputs (B, R, t) they stand."""
    batch, rows, _ = written.shape
    before, last = words[:, :-1].long(), words[:, -1].long()
    room = torch.full((batch, rows, before.shape[1]), -2)
    tail = torch.cat((room, written), 2)[:, :, written.shape[2] :]
    differ = ((tail[:, :, None] != before) & (before >= 0)).sum(3)
    found = (differ == 0) & (last >= 0)
    return last.clamp(min=0).expand(batch, rows, -1), found


class Choose(Part):
    """The best candidates of each sentence: outputs that end, and the rows of the next step."""

    inputs: ClassVar[Specs] = {
        **BEST,
        **{name: spec for name, spec in STATE.items() if name not in ("tokens", "parents")},
        **some(SENTENCES, "longest"),
        **some(VOCABULARY, "ends"),
        **some(INPUTS, "length_penalty"),
    }
    outputs = (*STATE, "all_active")

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Part.compute`."""
        after, beams = given["position"] + 1, given["kept_values"].shape[1]
        batch, rows, width = given["top_ids"].shape
        sums, plain = (
            (given[sum_of][:, :, None] + given[added]).flatten(1)
            for sum_of, added in (("values", "ruled"), ("scores", "plain"))
        )
        values, order = sums.topk(beams + rows * len(self.ends), dim=1)  # (B, M)
        tokens, scores = given["top_ids"].flatten(1).gather(1, order), plain.gather(1, order)
        parents = torch.div(order, width, rounding_mode="trunc") + torch.arange(batch)[:, None] * rows
        ends, last = (
            given["ends"].index_select(0, tokens.flatten()).view_as(tokens),
            (given["longest"] <= after)[:, None],
        )
        ending = (values > -torch.inf) & (ends | last) & given["active"][:, None]
        live, chosen = torch.where(ends, -torch.inf, values).topk(beams, dim=1)
        stuck = ~(live[:, :1] > -torch.inf)
        new = {"tokens": tokens, "parents": parents, "values": values, "scores": scores, "ends": ends, "ending": ending}
        new = {name: value[:, :beams] for name, value in new.items()}
        kept = self.keep(given, new, stuck)
        ended = given["ended"] + new["ending"].sum(1).int()
        stopped = self.stopped(given, kept["kept_values"][:, -1], live[:, 0], ended)
        active = given["active"] & ~(last[:, 0] | stuck[:, 0] | stopped)
        tokens = torch.where(live > -torch.inf, tokens.gather(1, chosen), self.config.pad_id)
        parents = parents.gather(1, chosen)
        return {
            **kept,
            "tokens": tokens,
            "parents": parents.int(),
            "values": live,
            "scores": scores.gather(1, chosen),
            "written": extended(given["written"], parents, tokens),
            "position": after,
            "ended": ended,
            "active": active,
            "all_active": active.all(),
        }

    def keep(self, given: dict[str, Tensor], new: dict[str, Tensor], stuck: Tensor) -> dict[str, Tensor]:
        """The best of the kept outputs, the new ones and, of a sentence that ends without any, the rows before."""
        position, written, pad = given["position"], given["written"], self.config.pad_id
        values = torch.where(new["ending"], new["values"] / self.norm(given, position + 1), -torch.inf)
        none = stuck & ~((given["kept_values"][:, :1] > -torch.inf) | new["ending"].any(1, keepdim=True))
        unfinished = given["values"] / self.norm(given, position.clamp(min=1))  # -inf stays -inf
        unfinished = torch.where(none & given["active"][:, None], unfinished, -torch.inf)
        best, order = torch.cat((given["kept_values"], values, unfinished), 1).topk(values.shape[1], dim=1)
        same = torch.zeros_like(given["values"], dtype=INT)
        parts = {
            "kept_ids": (
                F.pad(given["kept_ids"], (0, 1), value=pad),
                extended(written, new["parents"], torch.where(new["ends"], pad, new["tokens"])),
                F.pad(written, (0, 1), value=pad),
            ),
            "kept_lengths": (given["kept_lengths"], position + 1 - new["ends"].int(), same + position),
            "kept_finished": (given["kept_finished"], new["ends"].int(), same),
            "kept_scores": (given["kept_scores"], new["scores"], given["scores"]),
        }
        pools = {name: torch.cat(part, 1) for name, part in parts.items()}
        ids = order[:, :, None].expand(-1, -1, pools["kept_ids"].shape[2])
        found = {name: pool.gather(1, ids if name == "kept_ids" else order) for name, pool in pools.items()}
        return {**found, "kept_values": best}

    def norm(self, given: dict[str, Tensor], length: Tensor) -> Tensor:
        """What the sum of an output of a length is divided by."""
        base = length.double() if self.options.length_norm == "power" else (length.double() + 5) / 6
        return base ** given["length_penalty"]

    def stopped(self, given: dict[str, Tensor], worst: Tensor, live: Tensor, ended: Tensor) -> Tensor:
        """Whether the stop rule ends sentences; of each its worst kept output, its best live sum, how many outputs."""
        if self.options.stop == "count":
            wanted = (
                self.options.patience * given["kept_values"].new_full((), given["kept_values"].shape[1]) + 0.5
            ).int()
            return ended >= wanted
        lengths = given["position"] + 1
        if self.options.stop == "exact":
            lengths = torch.where(given["length_penalty"] > 0, given["longest"], lengths + 1)
        return (live / self.norm(given, lengths) <= worst) & (worst > -torch.inf)


def extended(written: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
    """Outputs (B, R, t) of the rows that others continue, counted over all, and their next tokens: (B, K, t + 1)."""
    rows = written.flatten(0, 1).index_select(0, parents.flatten())
    return torch.cat((rows.view(*parents.shape, written.shape[2]), tokens[:, :, None]), 2)
