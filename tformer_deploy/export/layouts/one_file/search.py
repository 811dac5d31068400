"""The search of a file that generates by itself, in PyTorch: parts that are traced to graphs and joined by `joining`.

The rules are those of docs/decoding.md, for all sentences at once; `tformer_deploy.decoding` has them one by one. An
inner loop takes steps until an output ends; an outer loop collects it, and drops sentences that have ended.

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
INT, LONG, FLOAT, DOUBLE, BOOL = torch.int32, torch.int64, torch.float32, torch.float64, torch.bool
Specs = dict[str, tuple[torch.dtype, Shape]]

ROWS: Specs = {
    "tokens": (INT, ("batch", "rows")),
    "parents": (INT, ("batch", "rows")),
    "values": (DOUBLE, ("batch", "rows")),
    "scores": (DOUBLE, ("batch", "rows")),
    "written": (INT, ("batch", "rows", "length")),
}
"""Live hypotheses: what the next step is fed, whose rows they continue, sums after the rules and plain, outputs."""
POSITION: Specs = {"position": (INT, (1,))}
"""Steps so far."""
KEPT: Specs = {
    "kept_ids": (INT, ("all", "beams", "kept_length")),
    "kept_lengths": (INT, ("all", "beams")),
    "kept_finished": (INT, ("all", "beams")),
    "kept_scores": (DOUBLE, ("all", "beams")),
    "kept_values": (DOUBLE, ("all", "beams")),
    "ended": (INT, ("all",)),
}
"""Of all sentences, the best outputs that have ended, best first; a place without one has the value -inf. How many
have ended."""
SENTENCES: Specs = {
    "sentences": (LONG, ("batch",)),
    "longest": (INT, ("batch",)),
    "shortest": (INT, ("batch",)),
    "forced": (INT, ("batch", "forced")),
}
"""Of each sentence that goes on: its place among all, limits, and forced tokens, at least one column; -1: none."""
LIMITS = ("longest", "shortest", "forced")
EVENT: Specs = {
    "best_parents": (LONG, ("batch", "candidates")),
    "best_tokens": (INT, ("batch", "candidates")),
    "best_values": (DOUBLE, ("batch", "candidates")),
    "best_scores": (DOUBLE, ("batch", "candidates")),
    "best_ends": (BOOL, ("batch", "candidates")),
    "stuck": (BOOL, ("batch",)),
}
"""The candidates of a step at which an output ends, best first, and which sentences have none that goes on."""
BEFORE: Specs = {f"{name}_before": ROWS[name] for name in ("values", "scores", "written")}
"""The rows before that step."""
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
SIZES = {"batch": 2, "all": 15, "rows": 3, "beams": 4, "length": 5, "kept_length": 3, "candidates": 8, "forced": 6}
SIZES |= {"best": 7, "src_len": 8, "suppressed": 9, "bad_words": 10, "bad_length": 11, "first_ids": 12}
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
    outputs: tuple[str, ...] = (*ROWS, *POSITION, *KEPT, *SENTENCES, *VOCABULARY, "always")

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
            "sentences": torch.arange(batch),
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
        }


class Needed(Part):
    """Whether a rule changes log-probabilities at this step."""

    inputs: ClassVar[Specs] = {
        **POSITION,
        **some(SENTENCES, *LIMITS),
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

    inputs: ClassVar[Specs] = {**LOGS, "places": (FLOAT, ("beams",))}
    outputs = tuple(BEST)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Part.compute`. Of a row, K that do not end and all that do are enough."""
        best, ids = given["log_probs"].topk(given["places"].shape[0] + len(self.ends), dim=-1)
        return {"top_ids": ids.int(), "ruled": best, "plain": best}


class Ruled(Part):
    """The best candidates after all rules, in the order of docs/decoding.md."""

    inputs: ClassVar[Specs] = {
        **Best.inputs,
        **some(ROWS, "written"),
        **POSITION,
        **some(SENTENCES, *LIMITS),
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
        best, ids = ruled.topk(given["places"].shape[0] + len(self.ends), dim=-1)
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
    """The best candidates of each sentence, and those of them that are the rows of the next step."""

    inputs: ClassVar[Specs] = {
        **BEST,
        **some(ROWS, "values", "scores", "written"),
        **POSITION,
        **some(SENTENCES, "longest"),
        **some(VOCABULARY, "ends"),
        "places": (FLOAT, ("beams",)),
    }
    outputs = (*ROWS, *POSITION, *EVENT, "goes_on")

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Part.compute`. `goes_on`: no output ends at this step."""
        after, beams, top_ids = given["position"] + 1, given["places"].shape[0], given["top_ids"]
        batch, rows, width = top_ids.shape
        sums, plain = (
            (given[sum_of][:, :, None] + given[added]).flatten(1)
            for sum_of, added in (("values", "ruled"), ("scores", "plain"))
        )
        values, order = sums.topk(beams + rows * len(self.ends), dim=1)  # (B, M)
        owners = torch.arange(batch * rows)[:, None].expand(-1, width).contiguous().view(batch, -1)
        tokens, scores = top_ids.flatten(1).gather(1, order), plain.gather(1, order)
        parents = owners.gather(1, order)
        ends = given["ends"].index_select(0, tokens.flatten()).view_as(tokens)
        ending = (values > -torch.inf) & (ends | (given["longest"] <= after)[:, None])
        live, chosen = torch.where(ends, -torch.inf, values).topk(beams, dim=1)
        stuck = ~(live[:, 0] > -torch.inf)
        next_tokens = torch.where(live > -torch.inf, tokens.gather(1, chosen), self.config.pad_id)
        next_parents = parents.gather(1, chosen)
        return {
            "best_parents": parents,
            "best_tokens": tokens,
            "best_values": values,
            "best_scores": scores,
            "best_ends": ends,
            "stuck": stuck,
            "tokens": next_tokens,
            "parents": next_parents.int(),
            "values": live,
            "scores": scores.gather(1, chosen),
            "written": extended(given["written"], next_parents, next_tokens),
            "position": after,
            "goes_on": ending[:, :beams].sum() + stuck.sum() == 0,
        }


class Collect(Part):
    """Outputs that have ended, and the sentences that go on."""

    inputs: ClassVar[Specs] = {
        **EVENT,
        **BEFORE,
        **some(ROWS, "values"),
        **POSITION,
        **KEPT,
        **some(SENTENCES, "sentences", "longest"),
        **some(INPUTS, "length_penalty"),
    }
    outputs = (*KEPT, "going")

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Part.compute`. `position` counts the step at which outputs end."""
        beams, places = given["kept_values"].shape[1], given["sentences"]
        kept = {name: given[name].index_select(0, places) for name in KEPT}
        new = {name: given[f"best_{name}"][:, :beams] for name in ("parents", "tokens", "values", "scores", "ends")}
        last = given["longest"] <= given["position"]
        ending = (new["values"] > -torch.inf) & (new["ends"] | last[:, None])
        found = self.best(given, kept, new, ending)
        found["ended"] = kept["ended"] + ending.sum(1).int()
        stopped = self.stopped(given, found["kept_values"][:, -1], found["ended"])
        longer = found["kept_ids"].shape[2] - given["kept_ids"].shape[2]
        padded = F.pad(given["kept_ids"], (0, longer), value=self.config.pad_id)
        whole = {**given, "kept_ids": padded}
        for name, value in found.items():
            rows = places.view(-1, *[1] * (value.ndim - 1)).expand_as(value)
            found[name] = whole[name].scatter(0, rows, value)
        return {**found, "going": ~(last | given["stuck"] | stopped)}

    def best(
        self, given: dict[str, Tensor], kept: dict[str, Tensor], new: dict[str, Tensor], ending: Tensor
    ) -> dict[str, Tensor]:
        """The best of the kept outputs, the new ones and, of a sentence that ends without any, the rows before."""
        length, written, pad = given["position"], given["written_before"], self.config.pad_id
        values = torch.where(ending, new["values"] / self.norm(given, length), -torch.inf)
        any_output = (kept["kept_values"][:, 0] > -torch.inf) | (ending.sum(1) > 0)
        unfinished = given["values_before"] / self.norm(given, (length - 1).clamp(min=1))  # -inf stays -inf
        unfinished = torch.where((given["stuck"] & ~any_output)[:, None], unfinished, -torch.inf)
        best, order = torch.cat((kept["kept_values"], values, unfinished), 1).topk(values.shape[1], dim=1)
        same = torch.zeros_like(unfinished, dtype=INT)
        room = written.shape[2] + 1 - kept["kept_ids"].shape[2]
        parts = {
            "kept_ids": (
                F.pad(kept["kept_ids"], (0, room), value=pad),
                extended(written, new["parents"], torch.where(new["ends"], pad, new["tokens"])),
                F.pad(written, (0, 1), value=pad),
            ),
            "kept_lengths": (kept["kept_lengths"], length - new["ends"].int(), same + length - 1),
            "kept_finished": (kept["kept_finished"], new["ends"].int(), same),
            "kept_scores": (kept["kept_scores"], new["scores"], given["scores_before"]),
        }
        pools = {name: torch.cat(part, 1) for name, part in parts.items()}
        ids = order[:, :, None].expand(-1, -1, pools["kept_ids"].shape[2])
        found = {name: pool.gather(1, ids if name == "kept_ids" else order) for name, pool in pools.items()}
        return {**found, "kept_values": best}

    def norm(self, given: dict[str, Tensor], length: Tensor) -> Tensor:
        """What the sum of an output of a length is divided by."""
        base = length.double() if self.options.length_norm == "power" else (length.double() + 5) / 6
        return base ** given["length_penalty"]

    def stopped(self, given: dict[str, Tensor], worst: Tensor, ended: Tensor) -> Tensor:
        """Which sentences the stop rule ends, by their worst kept outputs (B), and how many have ended (B).

        Rules other than `count` are of beams: greedy search ends with its first output.
        """
        beams = worst.new_full((), given["kept_values"].shape[1])
        if self.options.stop == "count":
            return ended >= (self.options.patience * beams + 0.5).int().clamp(min=1)
        lengths = given["position"]
        if self.options.stop == "exact":
            lengths = torch.where(given["length_penalty"] > 0, given["longest"], lengths + 1)
        beaten = (given["values"][:, 0] / self.norm(given, lengths) <= worst) & (worst > -torch.inf)
        # ONNX Runtime has no Where of booleans.
        return (beaten & (beams > 1)) | ((ended > 0) & (beams <= 1))


def extended(written: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
    """Outputs (B, R, t) of the rows that others continue, counted over all, and their next tokens: (B, K, t + 1)."""
    rows = written.flatten(0, 1).index_select(0, parents.flatten())
    return torch.cat((rows.view(*parents.shape, written.shape[2]), tokens[:, :, None]), 2)
