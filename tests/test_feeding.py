"""A runtime written from docs/bundle.md alone: every kind is fed as that page says, and all say the same.

Only JSON, numpy and ONNX Runtime; nothing of the package.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before the library loads
import onnxruntime as ort

BUNDLES = Path(__file__).parent / "bundles"
# Of the page as well; this file imports nothing of the package.
VNNI_MISSING = str(int("_vnni" not in Path("/proc/cpuinfo").read_text()))
CAPACITY, DEAD = 16, np.float32(-1e9)
Feed = dict[str, Any]


class Runtime:
    """The graphs of a bundle or of one of its variants."""

    def __init__(self, bundle: str, variant: str = "", step: str = "decoder_step") -> None:
        self.folder = BUNDLES / bundle
        self.manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        for name, expected in self.manifest["files"].items():
            assert hashlib.sha256((self.folder / name).read_bytes()).hexdigest() == expected
        part = self.manifest["variants"][variant] if variant else self.manifest
        self.recipe, self.model, self.place = part["recipe"], self.manifest["model"], self.folder / variant
        self.sessions = {name: self.open(name) for name in ("encoder", step)}
        self.step = self.sessions[step]
        caches = [value for value in self.step.get_inputs() if value.name.startswith("past_")]
        self.past = [value.name for value in caches]
        self.heads, self.head_size = caches[0].shape[1], caches[0].shape[3]

    def open(self, name: str) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.x64quantprecision", VNNI_MISSING)
        return ort.InferenceSession(str(self.place / f"{name}.onnx"), options, ["CPUExecutionProvider"])

    def encode(self, sources: list[list[int]]) -> Feed:
        """What every step is fed of some sources."""
        lengths = np.array([len(source) for source in sources], np.int32)
        ids = np.full((len(sources), lengths.max()), self.model.get("pad_id"), np.int32)
        for row, source in zip(ids, sources, strict=True):
            row[: len(source)] = source
        session = self.sessions["encoder"]
        names = [value.name for value in session.get_outputs()]
        found = session.run(None, {"src_ids": ids, "src_lengths": lengths})
        return {**dict(zip(names, found, strict=True)), "src_lengths": lengths}

    def ids(self, line: str) -> list[int]:
        """By the text rules, for a word list."""
        entries = (self.folder / self.manifest["tokenizer"]["source"]["file"]).read_text(encoding="utf-8").split("\n")
        return [*(entries.index(word) for word in line.split()), 3]

    def zeros(self, rows: int, capacity: int) -> Feed:
        return {name: np.zeros((rows, self.heads, capacity, self.head_size), np.float32) for name in self.past}


class Growing(Runtime):
    """`growing/1`: any number of beams at any step."""

    def begin(self, sources: list[list[int]], beams: int) -> None:
        self.given, self.position = self.encode(sources), 0
        self.caches = self.zeros(len(sources) * beams, 0)

    def feed(self, tokens: Any, parents: Any) -> Feed:
        """One step: tokens and parents [batch, beams]; the outputs by name."""
        inputs = {"tokens": tokens, "parents": parents, "position": np.array([self.position], np.int32)}
        names = [value.name for value in self.step.get_outputs()]
        found = dict(zip(names, self.step.run(None, {**inputs, **self.given, **self.caches}), strict=True))
        self.caches = {name: found[name.replace("past", "present")] for name in self.past}
        self.position += 1
        return found


class InPlace(Runtime):
    """`inplace/1`, and `short/1` with `listed`: buffers bound once, beams renamed."""

    listed: Feed = {}  # noqa: RUF012
    more: Feed = {}  # noqa: RUF012

    def begin(self, sources: list[list[int]], beams: int) -> None:
        self.given, self.position = self.encode(sources), 0
        nothing = np.nan  # buffers need no first value
        self.caches = {name: zeros + nothing for name, zeros in self.zeros(len(sources) * beams, CAPACITY).items()}
        own = np.arange(beams, dtype=np.int32)[:, None]
        self.written_by = np.ascontiguousarray(np.broadcast_to(own, (len(sources), beams, CAPACITY)))

    def feed(self, tokens: Any, parents: Any) -> Feed:
        batch, beams = tokens.shape
        old = self.written_by.copy()
        for b in range(batch):
            for k in range(beams):
                self.written_by[b, k, : self.position] = old[b, parents[b, k] - b * beams, : self.position]
        inputs = {"tokens": tokens, "position": np.array([self.position], np.int32), "written_by": self.written_by}
        inputs |= self.more
        binding = self.step.io_binding()
        for name, array in {**inputs, **self.given, **self.listed}.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))
        names = [value.name for value in self.step.get_outputs() if not value.name.startswith("present_")]
        for name in names:
            binding.bind_output(name)
        for name, array in self.caches.items():
            shared = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, shared)
            binding.bind_ortvalue_output(name.replace("past", "present"), shared)
        self.step.run_with_iobinding(binding)
        self.position += 1
        order = [value.name for value in self.step.get_outputs()]
        found = dict(zip(names, [binding.get_outputs()[order.index(n)].numpy() for n in names], strict=True))
        return {name: array.reshape(batch, beams, -1) for name, array in found.items()}


class Slots(InPlace):
    """`slots/1`: the same, each sentence at a position of its own; those that are not live wait in their places."""

    def begin(self, sources: list[list[int]], beams: int) -> None:
        super().begin(sources, beams)
        self.live, self.positions = np.ones((len(sources), 1), np.int32), np.zeros((len(sources), beams), np.int32)

    def join(self, b: int) -> None:
        """Take a sentence from its place into the batch."""
        beams = self.positions.shape[1]
        for array in self.caches.values():
            array[b * beams : (b + 1) * beams, :, : self.position] = 0
        self.written_by[b] = np.arange(beams, dtype=np.int32)[:, None]
        self.live[b] = 1

    def feed(self, tokens: Any, parents: Any) -> Feed:
        self.more = {"positions": self.positions.copy()}
        found = super().feed(tokens, parents)
        self.positions += self.live
        return found


class DeviceSearch(Runtime):
    """`device_search/1`, on ONNX Runtime: two sets of buffers, which hold anything, sums and the choice."""

    end_id, live_beams = -1, 0

    def begin(self, sources: list[list[int]], beams: int) -> None:
        self.given = self.encode(sources)
        self.positions = np.zeros((len(sources), beams), np.int32)
        self.values = np.zeros((len(sources), beams), np.float32)
        self.caches = {name: zeros + np.nan for name, zeros in self.zeros(len(sources) * beams, CAPACITY).items()}

    def join(self, b: int) -> None:
        """Begin with a sentence where another one left whatever it wrote."""
        self.positions[b] = 0
        for array in self.caches.values():
            array.reshape(len(self.positions), -1)[b] = np.nan

    def feed(self, tokens: Any, parents: Any) -> Feed:
        batch, beams = tokens.shape
        inputs = {"tokens": tokens, "parents": parents, "positions": self.positions}
        inputs |= {"values": self.values, "end_id": np.array([self.end_id], np.int32)}
        inputs["live_beams"] = np.array([self.live_beams or beams], np.int32)
        names = [value.name for value in self.step.get_outputs()]
        found = dict(zip(names, self.step.run(None, {**inputs, **self.given, **self.caches}), strict=True))
        self.caches = {name: found[name.replace("past", "present")] for name in self.past}
        most = self.recipe["axes"]["past_len"]["max"]
        assert np.array_equal(found["next_positions"], np.minimum(self.positions + 1, most))
        self.positions = found["next_positions"]
        rows = ("top_ids", "top_scores", "log_probs")
        return {**found, **{name: found[name].reshape(batch, beams, -1) for name in rows}}


SOURCES = [[4, 9, 7, 3], [11, 3], [6, 6, 12, 5, 8, 3]]


def script(runtime: Any, beams: int, steps: int = 6) -> list[tuple[Any, Any, Feed]]:
    """Tokens and parents that are drawn, the same for every runtime, and what each step gives."""
    rng = np.random.default_rng(beams)
    batch, vocab = len(SOURCES), runtime.model["tgt_vocab"]
    own = np.arange(batch * beams, dtype=np.int32).reshape(batch, beams)
    runtime.begin(SOURCES, beams)
    tokens, parents, done = np.full((batch, beams), 2, np.int32), own, []
    for _ in range(steps):
        done.append((tokens, parents, runtime.feed(tokens, parents)))
        tokens = rng.integers(4, vocab, (batch, beams)).astype(np.int32)
        drawn = rng.integers(0, beams, (batch, beams)).astype(np.int32)
        parents = (drawn + own[:, :1]).astype(np.int32)
    return done


def alone(bundle: str, steps: list[tuple[Any, Any, Feed]], b: int, k: int) -> Any:
    """Log-probabilities of the last step's row, its history fed as the only row of the only sentence."""
    beams, row, history = steps[0][0].shape[1], b * steps[0][0].shape[1] + k, []
    for tokens, parents, _ in reversed(steps):
        history.append(int(tokens.ravel()[row]))
        row = int(parents.ravel()[row])
    assert row // beams == b
    runtime = Growing(bundle)
    runtime.begin([SOURCES[b]], 1)
    for token in reversed(history):
        found = runtime.feed(np.array([[token]], np.int32), np.zeros((1, 1), np.int32))
    return found["log_probs"][0, 0]


@pytest.mark.parametrize(("variant", "apart"), [("", 2e-5), ("int8", 0.02)])
def test_memory_without_a_decoder(variant: str, apart: float) -> None:
    """Lines beside each other; what is behind a source's length has no meaning."""
    answers = json.loads((BUNDLES / "v2/copy.json").read_text())
    vectors = answers["vectors"][variant or "fp32"]
    runtime = Runtime("v2/copy", variant)
    runtime.sessions["encoder"] = runtime.open("memory")
    given = runtime.encode([runtime.ids(line) for line in answers["lines"]])
    for row, n, expected in zip(given["memory"], given["src_lengths"], vectors, strict=True):
        assert np.abs(row[:n].mean(0) - expected).max() < apart


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("kind", "bundle", "variant"),
    [
        (Growing, "v2/copy", ""),
        (InPlace, "v2/copy", "fp32-cpu"),
        (DeviceSearch, "v2/copy", "trt"),
        (Growing, "v2/names", ""),
    ],
)
def test_rows_that_change_their_histories(kind: Any, bundle: str, variant: str, beams: int) -> None:
    """Every row gives what its own history gives, fed alone to the standard graphs."""
    runtime = kind(bundle, variant)
    steps = script(runtime, beams)
    for b in range(len(SOURCES)):
        for k in range(beams):
            expected = alone(bundle, steps, b, k)
            found = steps[-1][2]
            assert np.abs(found["log_probs"][b, k] - expected).max() < 1e-4
            best = runtime.recipe["top_k"] or 2 * beams - (kind is Growing)
            order = np.argsort(-found["log_probs"][b, k], kind="stable")[:best]
            assert found["top_ids"][b, k].tolist() == order.tolist()
            assert np.array_equal(found["top_scores"][b, k], found["log_probs"][b, k][order])
    if "attention" in found:
        lengths = [len(source) for source in SOURCES]
        assert all(not found["attention"][b, :, n:].any() for b, n in enumerate(lengths))
        assert np.abs(found["attention"].sum(-1) - 1).max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "bundle", "graph"), [(Slots, "v2/copy", ("fp32-cpu", "slots_step")), (DeviceSearch, "v2/copy", ("trt",))]
)
def test_a_sentence_joins_others_on_their_way(kind: Any, bundle: str, graph: tuple[str, ...]) -> None:
    runtime, beams, first = kind(bundle, *graph), 2, 3
    runtime.begin(SOURCES, beams)
    if kind is Slots:
        runtime.live[1] = 0
    own = np.arange(len(SOURCES) * beams, dtype=np.int32).reshape(-1, beams)
    rng, vocab = np.random.default_rng(1), runtime.model["tgt_vocab"]
    tokens, parents, steps = np.full(own.shape, 2, np.int32), own, []
    for step in range(8):
        if step == first:
            runtime.join(1)
            tokens[1], parents[1] = 2, own[1]
        steps.append((tokens, parents, runtime.feed(tokens, parents)))
        tokens = rng.integers(4, vocab, own.shape).astype(np.int32)
        parents = (rng.integers(0, beams, own.shape) + own[:, :1]).astype(np.int32)
    for b in range(len(SOURCES)):
        for k in range(beams):
            expected = alone(bundle, steps[first:] if b == 1 else steps, b, k)
            assert np.abs(steps[-1][2]["log_probs"][b, k] - expected).max() < 1e-4


def test_a_growing_step_may_gain_rows_and_lose_sentences() -> None:
    full, fewer = Growing("v2/copy"), Growing("v2/copy")
    first = np.full((3, 1), 2, np.int32)
    for runtime in (full, fewer):
        runtime.begin(SOURCES, 1)
        runtime.feed(first, np.arange(3, dtype=np.int32)[:, None])
    tokens = np.array([[4, 5], [6, 7], [8, 9]], np.int32)
    parents = np.repeat(np.arange(3, dtype=np.int32)[:, None], 2, 1)
    whole = full.feed(tokens, parents)["log_probs"]
    kept = [0, 2]
    fewer.given = {name: array[kept] for name, array in fewer.given.items()}
    assert np.abs(fewer.feed(tokens[kept], parents[kept])["log_probs"] - whole[kept]).max() < 1e-5


def test_buffers_of_inplace_are_copied_to_change_their_beams() -> None:
    narrow, wide = InPlace("v2/copy", "fp32-cpu"), InPlace("v2/copy", "fp32-cpu")
    narrow.begin(SOURCES, 1)
    narrow.feed(np.full((3, 1), 2, np.int32), np.arange(3, dtype=np.int32)[:, None])
    wide.begin(SOURCES, 2)
    same = np.arange(6, dtype=np.int32).reshape(3, 2)
    wide.feed(np.full((3, 2), 2, np.int32), same)
    tokens = np.array([[4, 5], [6, 7], [8, 9]], np.int32)
    expected = wide.feed(tokens, same)["log_probs"]
    moved = InPlace("v2/copy", "fp32-cpu")
    moved.begin(SOURCES, 2)
    for name, array in moved.caches.items():
        array[:, :, :1] = np.repeat(narrow.caches[name][:, :, :1], 2, 0)
    moved.position = 1
    assert np.abs(moved.feed(tokens, same)["log_probs"] - expected).max() < 1e-5


@pytest.mark.parametrize("variant", ["fp32-cpu", "int8-latency", "int4"])
def test_short_steps_score_a_list(variant: str) -> None:
    """The full step's scores of the allowed tokens, normalised over them."""
    full, short = InPlace("v2/copy", variant), InPlace("v2/copy", variant, "short_step")
    vocab = full.model["tgt_vocab"]
    allowed = np.ones((3, vocab), np.bool_)
    allowed[0, [5, 8]] = allowed[1, [4, 9, 10]] = allowed[:, 13] = False
    ids = np.flatnonzero(allowed.any(0)).astype(np.int32)
    filled = np.concatenate([ids, np.zeros(3, np.int32)])
    mask = np.full((3, 1, len(filled)), -np.inf, np.float32)
    mask[:, 0, : len(ids)][allowed[:, ids]] = 0
    rows = short.open("short_rows")
    given = dict(zip([v.name for v in rows.get_outputs()], rows.run(None, {"shortlist": filled}), strict=True))
    short.listed = {"shortlist": filled, **given, "listed_mask": mask}
    tolerance = 1e-4 if variant == "fp32-cpu" else 0.5  # there, a listed product is better by a rounding
    for (*_, whole), (*_, some) in zip(script(full, 2), script(short, 2), strict=True):
        scores = np.where(allowed[:, None], whole["log_probs"], -np.inf)
        scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
        assert not np.isfinite(some["log_probs"][..., len(ids) :]).any()
        both = np.isfinite(scores[..., ids])
        assert (both == np.isfinite(some["log_probs"][..., : len(ids)])).all()
        assert np.abs(scores[..., ids][both] - some["log_probs"][..., : len(ids)][both]).max() < tolerance
        places = np.argsort(-some["log_probs"], axis=-1, kind="stable")[..., :4]
        assert (some["top_ids"] == filled[places]).all()


def test_the_choice_is_a_beam_search() -> None:
    """Fed back, it is the plain search over the same scores, of as many beams as live."""
    runtime = DeviceSearch("v2/copy", "trt")
    runtime.end_id, runtime.live_beams = 3, 2
    runtime.begin(SOURCES, 3)
    runtime.values[:, 1:] = DEAD  # one row begins
    tokens, parents = np.full((3, 3), 2, np.int32), np.arange(9, dtype=np.int32).reshape(3, 3)
    for _ in range(5):
        found = runtime.feed(tokens, parents)
        sums = runtime.values[:, :, None] + found["top_scores"]
        sums = np.where(found["top_ids"] == 3, DEAD, sums)
        for b in range(3):
            order = np.argsort(-sums[b].ravel(), kind="stable")[:3]
            rows, places = np.divmod(order, sums.shape[2])
            alive = (np.arange(3) < 2) & (sums[b].ravel()[order] > DEAD)
            assert (found["next_tokens"][b] == found["top_ids"][b, rows, places])[alive].all()
            assert (found["next_parents"][b] == b * 3 + rows)[alive].all()
            assert np.array_equal(found["next_values"][b, :2], sums[b].ravel()[order][:2])
            assert found["next_values"][b, 2] == DEAD
        tokens, parents, runtime.values = (found[f"next_{name}"] for name in ("tokens", "parents", "values"))


@pytest.mark.parametrize(
    ("kind", "bundle", "variant"),
    [
        (Growing, "v2/copy", ""),
        (InPlace, "v2/copy", "int8"),
        (InPlace, "v2/copy", "int4"),
        (DeviceSearch, "v2/copy", "trt"),
    ],
)
def test_greedy_search_gives_the_stored_tokens(kind: Any, bundle: str, variant: str) -> None:
    answers = json.loads((BUNDLES / f"{bundle}.json").read_text())
    runtime = kind(bundle, variant)
    for line, expected in zip(answers["lines"], answers["greedy"][variant or "fp32"], strict=True):
        runtime.begin([runtime.ids(line)], 1)
        output, token = [], runtime.model.get("start_id", runtime.model["bos_id"])
        while token != runtime.model["eos_id"] and len(output) < runtime.recipe["axes"]["past_len"]["max"] + 1:
            found = runtime.feed(np.array([[token]], np.int32), np.zeros((1, 1), np.int32))
            token = int(found["top_ids"][0, 0, 0])
            output.append(token)
        assert output == [*expected, runtime.model["eos_id"]]


def test_white_space_is_what_the_page_says() -> None:
    unicode_has = [
        *range(9, 14),
        32,
        0x85,
        0xA0,
        0x1680,
        *range(0x2000, 0x200B),
        0x2028,
        0x2029,
        0x202F,
        0x205F,
        0x3000,
    ]
    assert {i for i in range(0x110000) if not chr(i).strip()} == {*unicode_has, *range(0x1C, 0x20)}
