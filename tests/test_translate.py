"""Greedy decoding and the translator: against a plain loop, in every batch, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_deploy import load
from tformer_deploy.decoding import DecodeOptions, greedy
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.errors import LimitError, TformerError
from tformer_deploy.model import Transformer
from tformer_deploy.translate import Translator, length_batches

from .conftest import VOCAB, random_sources, small_config

BOS, EOS = 2, 3


@pytest.fixture(scope="module")
def model() -> Transformer:
    """A random model that is likelier to stop than most, so that sentences end at different steps."""
    model = Transformer(small_config(share_embeddings="none")).init_weights(3).eval()
    model.output.weight.data[EOS] *= 2
    return model


@pytest.fixture(scope="module")
def translator(bundle: Path) -> Iterator[Translator]:
    with load(bundle, threads=1, max_tokens=9) as translator:
        yield translator


def plain_greedy(model: Transformer, source: list[int], max_tokens: int) -> tuple[list[int], float]:
    """One sentence, no cache, no batch: the whole prefix through `forward` at every step."""
    target, score = [BOS], 0.0
    with torch.inference_mode():
        while len(target) <= max_tokens:
            logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([target]))
            log_probs = logits[0, -1].log_softmax(-1)
            target.append(int(log_probs.argmax()))
            score += float(log_probs[target[-1]])
            if target[-1] == EOS:
                return target[1:-1], score
    return target[1:], score


def test_greedy_equals_a_plain_loop(model: Transformer) -> None:
    src_ids, lengths = random_sources(12, 9)
    with EagerEngine(model) as engine:
        found = greedy(engine, src_ids, lengths, DecodeOptions(max_tokens=15))
    assert len({len(hypothesis.ids) for hypothesis in found}) > 1, "the model must stop at different steps"
    for ids, length, hypothesis in zip(src_ids, lengths, found, strict=True):
        expected, score = plain_greedy(model, ids[:length].tolist(), 15)
        assert hypothesis.ids == expected
        assert hypothesis.score == pytest.approx(score, abs=1e-4)
        assert hypothesis.finished == (len(expected) < 15)


def test_limit_of_positions_ends_a_sentence(model: Transformer) -> None:
    src_ids, lengths = random_sources(3, 4)
    with EagerEngine(model) as engine:
        found = greedy(engine, src_ids, lengths, DecodeOptions(max_tokens=500))
    assert max(len(hypothesis.ids) for hypothesis in found) <= 24
    with pytest.raises(LimitError, match="max_tokens=0"):
        DecodeOptions(max_tokens=0)


def test_equal_scores_go_to_the_lower_id(model: Transformer) -> None:
    tied = Transformer(model.config)
    for parameter in tied.parameters():
        parameter.data.zero_()
    src_ids, lengths = random_sources(2, 3)
    with EagerEngine(tied, top_k=5) as engine:
        best = engine.step(np.full((2, 1), BOS, np.int32), engine.encode(src_ids, lengths))
    assert (best.ids == np.arange(5)).all()


@settings(deadline=None, max_examples=15)
@given(st.lists(st.lists(st.integers(4, VOCAB - 1), max_size=23).map(lambda ids: [*ids, EOS]), max_size=12))
def test_order_and_batch_change_nothing(translator: Translator, sources: list[list[int]]) -> None:
    translator.batch_tokens = 40
    together = translator.generate(sources)
    translator.batch_tokens = 1
    for source, result in zip(sources, together, strict=True):
        (alone,) = translator.generate([source])
        assert alone.ids == result.ids
        assert alone.score == pytest.approx(result.score, abs=1e-4)


def test_lines_come_back_in_order_and_empty_ones_empty(translator: Translator) -> None:
    translator.batch_tokens = 30
    lines = ["w5 w6 w7", "", "w8", "   ", "w9 w10 w11 w12 w13", "w8"]
    results = translator.translate(lines)
    assert [bool(result.ids) for result in results] == [True, False, True, False, True, True]
    assert results[1].text == "" and results[1].score == 0.0
    assert results[2] == results[5] == translator.translate(["w8"])[0]
    assert translator.translate([]) == []


def test_too_long_line_is_named(translator: Translator) -> None:
    with pytest.raises(LimitError, match="line 12: a source of 31 tokens exceeds the limit of 24"):
        translator.translate(["w5", "w6 " * 30], first_line=11)


def test_bad_ids_name_their_source(translator: Translator) -> None:
    for bad in (VOCAB, -1, 2**40):
        with pytest.raises(LimitError, match=f"source 2: token id {bad} is outside the source vocabulary of {VOCAB}"):
            translator.generate([[5, EOS], [bad, EOS]])


def test_closed_translator_says_so(bundle: Path) -> None:
    translator = load(bundle, threads=1)
    translator.close()
    with pytest.raises(TformerError, match="closed"):
        translator.translate(["w5"])


def test_eager_and_ort_translators_agree(bundle: Path, translator: Translator) -> None:
    lines = [" ".join(f"w{4 + (i * j) % 50}" for j in range(1, 2 + i % 20)) for i in range(40)]
    with load(bundle, backend="eager", max_tokens=9) as eager:
        for ours, theirs in zip(eager.translate(lines), translator.translate(lines), strict=True):
            assert ours.ids == theirs.ids and ours.text == theirs.text
            assert ours.score == pytest.approx(theirs.score, abs=1e-4)


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 200), st.integers(1, 9))
def test_length_batches_cover_every_request_once(lengths: list[int], tokens: int, rows: int) -> None:
    batches = list(length_batches(lengths, tokens, rows))
    assert sorted(i for batch in batches for i in batch) == [i for i, length in enumerate(lengths) if length]
    for batch in batches:
        assert len(batch) <= rows
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= tokens
