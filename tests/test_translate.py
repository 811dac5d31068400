"""The translator: against plain loops, in every batch, in order, piece by piece; scores of given outputs."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tformer_deploy
from tformer_deploy import load
from tformer_deploy.base.errors import ConfigError, DataError, LimitError, NotNumbers, TformerError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.text import SPECIALS, SentencePiece, Tokenizers, Words
from tformer_deploy.decoding import Batch, DecodeOptions, Decoding, decode, score
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import Ints, Scores
from tformer_deploy.engines.eager import EagerEngine, EagerState
from tformer_deploy.model.network import Transformer
from tformer_deploy.translate.settings import TranslatorSettings
from tformer_deploy.translate.translator import Result, Translator, length_batches, make_batch

from .conftest import VOCAB, random_sources, small_config

BOS, EOS = 2, 3
WORDS = Words([*SPECIALS, *(f"w{i}" for i in range(4, VOCAB))], None)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"beams": 4, "n_best": 3},
    "sampling": {"sampling": True, "n_best": 2, "seed": 7, "top_p": 0.9},
}


def make_lines(count: int) -> list[str]:
    """Lines of 1 to 20 words, of which every seventh is empty."""
    return [" ".join(f"w{4 + (i * j) % 50}" for j in range(1, 2 + i % 20)) * bool(i % 7) for i in range(count)]


class Counting(EagerEngine):
    """Eager PyTorch that counts its calls."""

    encoded = stepped = 0

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Any = None) -> EagerState:
        self.encoded += 1
        return super().encode(src_ids, src_lengths)

    def step(self, tokens: Ints, state: EagerState, full: bool = False, attention: bool = False) -> Scores:
        self.stepped += 1
        return super().step(tokens, state, full, attention)


@pytest.fixture(scope="module")
def model() -> Transformer:
    """A random model that is likelier to stop than most, so that sentences end at different steps."""
    model = Transformer(small_config(share_embeddings="none")).init_weights(3).eval()
    model.output.weight.data[EOS] *= 2
    return model


@pytest.fixture(scope="module")
def exact(model: Transformer) -> Transformer:
    """The same in 64 bits, so that no batch changes a rounding that matters."""
    doubled = Transformer(model.config).double().eval()
    doubled.load_state_dict(model.state_dict())
    return doubled


@pytest.fixture(scope="module")
def translator(bundle: Path) -> Iterator[Translator]:
    with load(bundle, threads=1, max_tokens=9) as translator:
        yield translator


def translator_of(model: Transformer, allowed: list[str] | None = None, **options: Any) -> Translator:
    """An open translator of words, without a bundle."""
    values = {"max_tokens": 9, **options}
    settings = TranslatorSettings(batch_tokens=4096, allowed=allowed or ())
    return Translator(Counting(model), Tokenizers(WORDS, WORDS), DecodeOptions(**values), settings).open()


def same(ours: Result, theirs: Result, tolerance: float) -> bool:
    """Equal but for the last digits of scores."""
    both = list(zip([ours, *ours.alternatives], [theirs, *theirs.alternatives], strict=True))
    return all(
        (a.text, a.ids, a.finished, a.alignment) == (b.text, b.ids, b.finished, b.alignment) for a, b in both
    ) and all(abs(a.score - b.score) <= tolerance for a, b in both)


# Greedy search


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
        found = [best for [best] in decode(engine, Batch(src_ids, lengths), DecodeOptions(max_tokens=15))]
    assert len({len(hypothesis.ids) for hypothesis in found}) > 1, "the model must stop at different steps"
    for ids, length, hypothesis in zip(src_ids, lengths, found, strict=True):
        expected, score = plain_greedy(model, ids[:length].tolist(), 15)
        assert hypothesis.ids == expected
        assert hypothesis.score == pytest.approx(score, abs=1e-4)
        assert hypothesis.finished == (len(expected) < 15)


def test_limit_of_positions_ends_a_sentence(model: Transformer) -> None:
    src_ids, lengths = random_sources(3, 4)
    with EagerEngine(model) as engine:
        found = decode(engine, Batch(src_ids, lengths), DecodeOptions(max_tokens=500, min_tokens=500))
    assert [len(hypothesis.ids) for [hypothesis] in found] == [24, 24, 24]
    with pytest.raises(ConfigError, match="max_tokens=0"):
        DecodeOptions(max_tokens=0)


def test_equal_scores_go_to_the_lower_id(model: Transformer) -> None:
    tied = Transformer(model.config)
    for parameter in tied.parameters():
        parameter.data.zero_()
    src_ids, lengths = random_sources(2, 3)
    with EagerEngine(tied, top_k=5) as engine:
        best = engine.step(np.full((2, 1), BOS, np.int32), engine.encode(src_ids, lengths))
    assert (best.ids == np.arange(5)).all()


# Batches and order


sources_of_any_length = st.lists(
    st.lists(st.integers(4, VOCAB - 1), max_size=23).map(lambda ids: [*ids, EOS]), max_size=12
)


@settings(max_examples=15)
@given(sources_of_any_length)
def test_order_and_batch_change_nothing(translator: Translator, sources: list[list[int]]) -> None:
    translator.settings = replace(translator.settings, batch_tokens=40)
    together = translator.generate(sources)
    translator.settings = replace(translator.settings, batch_tokens=1)
    for source, result in zip(sources, together, strict=True):
        (alone,) = translator.generate([source])
        assert same(alone, result, 1e-4)


@pytest.mark.parametrize("mode", ["beam", "sampling"])
@settings(max_examples=6)
@given(sources=sources_of_any_length, batch_tokens=st.integers(1, 400))
def test_beams_and_samples_are_the_same_in_every_batch(
    exact: Transformer, mode: str, sources: list[list[int]], batch_tokens: int
) -> None:
    with translator_of(exact, **MODES[mode]) as translator:
        together = translator.generate(sources)
        translator.settings = replace(translator.settings, batch_tokens=batch_tokens)
        for ours, theirs in zip(translator.generate(sources), together, strict=True):
            assert same(ours, theirs, 1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_the_number_of_a_line_is_all_that_seeds_it(exact: Transformer, mode: str) -> None:
    lines = make_lines(20)
    with translator_of(exact, **MODES[mode]) as translator:
        whole = translator.translate(lines)
        for part, all_of_it in zip(translator.results(lines[12:], first=12), whole[12:], strict=True):
            assert same(part, all_of_it, 1e-9)
        other = list(translator.results(lines, first=1))
        assert all(map(same, other, whole, [1e-9] * 20)) == (mode != "sampling")


def test_lines_come_back_in_order_and_empty_ones_empty(translator: Translator) -> None:
    translator.settings = replace(translator.settings, batch_tokens=30)
    lines = ["w5 w6 w7", "", "w8", "   ", "w9 w10 w11 w12 w13", "w8"]
    results = translator.translate(lines)
    assert [bool(result.ids) for result in results] == [True, False, True, False, True, True]
    assert results[1] == results[3] == Result("", [], 0.0)
    assert results[2] == results[5] == translator.translate(["w8"])[0]
    assert translator.translate([]) == []


@pytest.mark.parametrize("lines", [make_lines(30), make_lines(30)[::-1], ["w5 " * n for n in range(20, 0, -1)]])
def test_results_come_as_soon_as_all_before_them_are_known(model: Transformer, lines: list[str]) -> None:
    with translator_of(model, max_tokens=3) as translator:
        translator.settings = replace(translator.settings, batch_tokens=30)
        sizes = [len(line.split()) + 1 if line else 0 for line in lines]
        batch_of = {i: n for n, batch in enumerate(length_batches(sizes, 30, lambda longest: 1024), 1) for i in batch}
        needed = [max([0, *(batch_of.get(before, 0) for before in range(i + 1))]) for i in range(len(lines))]
        assert isinstance(translator.engine, Counting)
        decoded = []
        for result in translator.results(lines):
            decoded.append(translator.engine.encoded)
            assert bool(result.ids) == bool(sizes[len(decoded) - 1]) or result.finished
        assert decoded == needed and len(set(decoded)) > 1


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 200), st.integers(1, 9))
def test_length_batches_cover_every_request_once(lengths: list[int], tokens: int, rows: int) -> None:
    batches = list(length_batches(lengths, tokens, lambda longest: rows))
    assert sorted(i for batch in batches for i in batch) == [i for i, length in enumerate(lengths) if length]
    for batch in batches:
        assert len(batch) <= rows
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= tokens


def test_a_batch_counts_every_beam(exact: Transformer) -> None:
    """40 tokens are 8 sources of 5 tokens, or 2 with a beam of 4, or one with more beams than tokens."""
    for beams, encoded in ((1, 1), (4, 4), (50, 8)):
        with translator_of(exact, beams=beams, max_tokens=2) as translator:
            translator.settings = replace(translator.settings, batch_tokens=40)
            translator.translate(["w5 w6 w7 w8"] * 8)
            assert isinstance(translator.engine, Counting) and translator.engine.encoded == encoded


# What is asked for


@pytest.mark.parametrize("mode", MODES)
def test_results_are_what_decoding_finds(exact: Transformer, mode: str) -> None:
    sources = [[5, 6, EOS], [7, EOS], [8, 9, 10, EOS]]
    with translator_of(exact, **MODES[mode]) as translator:
        batch = make_batch(sources, 1, range(3))
        found = decode(translator.engine, batch, translator.options)
        for result, hypotheses in zip(translator.generate(sources), found, strict=True):
            results = [result, *result.alternatives]
            assert len(results) == translator.options.n_best
            assert [(each.ids, each.finished) for each in results] == [(h.ids, h.finished) for h in hypotheses]
            assert [each.score for each in results] == pytest.approx([h.score for h in hypotheses], abs=1e-9)
            assert [each.text for each in results] == [WORDS.decode(h.ids) for h in hypotheses]
            assert all(each.alternatives == [] for each in result.alternatives)


def test_other_seeds_give_other_samples(exact: Transformer) -> None:
    lines = make_lines(10)
    texts = []
    for seed in (7, 7, 8):
        with translator_of(exact, sampling=True, seed=seed) as translator:
            texts.append([result.text for result in translator.translate(lines)])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("mode", MODES)
def test_outputs_begin_with_their_prefixes(exact: Transformer, mode: str) -> None:
    lines, prefixes = make_lines(8), ["w9", "", "w10 w11", "", "w12", "w9 w9 w9", "", "w13"]
    with translator_of(exact, min_tokens=9, **MODES[mode]) as translator:
        free = translator.translate(lines)
        for i, result in enumerate(translator.translate(lines, prefixes)):
            begin = WORDS.encode(prefixes[i])
            for each in [result, *result.alternatives]:
                assert each.ids[: len(begin)] == (begin if lines[i] else [])
            assert begin or same(result, free[i], 1e-9)
        with pytest.raises(ConfigError, match="8 sources, 7 prefixes: give one a line"):
            translator.translate(lines, prefixes[:7])


def test_a_prefix_of_the_greedy_output_changes_nothing(exact: Transformer) -> None:
    lines = make_lines(12)
    with translator_of(exact, suppress=(0, 1, 2)) as translator:
        free = translator.translate(lines)
        prefixes = [" ".join(result.text.split()[: i % 4]) for i, result in enumerate(free)]
        for ours, theirs in zip(translator.translate(lines, prefixes), free, strict=True):
            assert same(ours, theirs, 1e-9)


def test_the_best_allowed_output_is_the_one_of_the_best_score(exact: Transformer) -> None:
    """A beam as wide as the set, ranked by plain sums, against scoring every output of the set."""
    lines = [line for line in make_lines(12) if line]
    allowed = ["w5 w6", "w5 w6 w7", "", "w11 w12 w13 w14", *(f"w{i}" for i in range(4, 30))]
    size = len(allowed)
    orders = set()
    with translator_of(exact, allowed, beams=size, n_best=size, length_penalty=0.0) as translator:
        results = translator.translate(lines)
        for line, result in zip(lines, results, strict=True):
            scores = [sum(values) for values in translator.score([line] * size, allowed)]
            found = [result, *result.alternatives]
            order = np.argsort(scores)[::-1]
            assert [each.text for each in found] == [allowed[i] for i in order]
            assert [each.score for each in found] == pytest.approx([scores[i] for i in order], abs=1e-9)
            assert all(each.finished for each in found)
            orders.add(tuple(order))
    assert len(orders) > 1
    for mode in MODES:
        with translator_of(exact, allowed, **MODES[mode]) as translator:
            for result in translator.translate(lines):
                assert {each.text for each in [result, *result.alternatives]} <= set(allowed)


def test_alignments_are_where_the_last_layer_looks(attention_bundle: Path, bundle: Path) -> None:
    lines = make_lines(20)
    options = {"threads": 1, "max_tokens": 9, "align": True, "beams": 3, "n_best": 2}
    with load(attention_bundle, **options) as ours, load(attention_bundle, "eager", **options) as eager:
        for line, result, expected in zip(lines, ours.translate(lines), eager.translate(lines), strict=True):
            assert same(result, expected, 1e-4)
            for each in [result, *result.alternatives]:
                assert len(each.alignment) == len(each.ids)
                assert all(0 <= position <= len(line.split()) for position in each.alignment)
        source, result = ours.tokenizers.source_ids(lines[19]), ours.translate(lines[19:])[0]
        batch = make_batch([source], 1)
        state = eager.engine.encode(batch.src_ids, batch.src_lengths)
        for token, position in zip([BOS, *result.ids[:-1]], result.alignment, strict=True):
            looks = eager.engine.step(np.array([[token]], np.int32), state, attention=True).attention
            assert looks is not None and looks.argmax() == position
        assert len(set(result.alignment)) > 1
    with pytest.raises(LimitError, match="recipe that has attention"):
        load(bundle, threads=1, align=True)


@pytest.mark.parametrize("given", [{}, {"beams": 3, "length_penalty": 0.6}], ids=["usual", "beam"])
def test_options_of_one_call_are_those_of_a_translator_of_its_own(bundle: Path, given: dict[str, Any]) -> None:
    lines = ["w5 w6 w7", "", "w9"]
    with load(bundle, **given) as translator:
        usual = translator.translate(lines)
        for asked in ({"beams": 4, "n_best": 2}, {"beams": 1}, {"max_tokens": 3}):
            with load(bundle, **{**given, **asked}) as other:
                expected = other.translate(lines)
            assert translator.translate(lines, **asked) == expected
            assert list(translator.results(lines, **asked)) == expected
        sources = [translator.tokenizers.source_ids(line) for line in lines if line]
        assert translator.generate(sources, beams=1) == [x for x in translator.translate(lines, beams=1) if x.text]
        streamed: list[str] = []
        assert translator.stream(lines[0], streamed.append, beams=1).text == "".join(streamed)
        assert translator.translate(lines) == usual, "a call changes nothing for the next"
        with pytest.raises(ConfigError, match="did you mean 'beams'"):
            translator.translate(lines, beam=4)
        with pytest.raises(LimitError, match="5000 beams exceed"):
            translator.translate(lines, beams=5000)
        options = "".join(f", {name}={value}" for name, value in given.items())
        assert repr(translator) == f"<Translator {bundle} on ort{options}, open>"
    with pytest.raises(TformerError, match="is not open"):
        translator.translate(lines, beams=4)
    assert repr(translator).endswith("closed>")


def test_threads_with_options_of_their_own_share_a_translator(bundle: Path) -> None:
    asked: list[dict[str, Any]] = [{"beams": beams} for beams in (1, 2, 4)] + [{"sampling": True, "seed": 3}]
    with load(bundle) as translator:
        expected = [translator.translate(["w5 w6", "w7"], **each) for each in asked]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda i: translator.translate(["w5 w6", "w7"], **asked[i % 4]), range(40)))
    assert found == [expected[i % 4] for i in range(40)]


def test_what_python_programs_use_is_listed() -> None:
    assert dir(tformer_deploy) == sorted(tformer_deploy.__all__)
    for name in tformer_deploy.__all__:
        assert getattr(tformer_deploy, name) is not None
    assert issubclass(tformer_deploy.LimitError, tformer_deploy.TformerError)


def test_load_takes_decoding_options_and_names_the_nearest(bundle: Path) -> None:
    with load(bundle, threads=1, beams=5, n_best=5, max_tokens=4) as translator:
        result = translator.translate(["w5 w6"])[0]
        assert len(result.alternatives) == 4
    with pytest.raises(ConfigError, match="'beems': did you mean 'beams'"):
        load(bundle, beems=5)
    with load(bundle, threads=1, decoding={"beams": 5, "max_tokens": 9}, max_tokens=4) as translator:
        assert (translator.options.beams, translator.options.max_tokens) == (5, 4)
    with pytest.raises(ConfigError, match="beams='5': must be of type int"):
        load(bundle, beams="5")
    with pytest.raises(ConfigError, match="n_best=2: must be at most beams=1"):
        load(bundle, n_best=2)


# Streaming


def streamed(translator: Translator, line: str, prefix: str = "", number: int = 0) -> tuple[list[str], Result]:
    """What a stream writes, and what it returns."""
    pieces: list[str] = []
    return pieces, translator.stream(line, pieces.append, prefix, number)


@pytest.mark.parametrize(
    "options", [{}, {"sampling": True, "seed": 3}, {"end_ids": (EOS, 14, 43)}, {"no_repeat_ngram": 1}]
)
def test_streamed_pieces_are_the_translation(exact: Transformer, options: dict[str, Any]) -> None:
    lines, prefixes = make_lines(15), ["w9 w10" * (i % 2) for i in range(15)]
    with translator_of(exact, suppress=(0, 1, 2), **options) as translator:
        results = translator.translate(lines, prefixes)
        for number, (line, prefix) in enumerate(zip(lines, prefixes, strict=True)):
            pieces, result = streamed(translator, line, prefix, number)
            assert same(result, results[number], 1e-9)
            assert "".join(pieces) == result.text and len(pieces) == len(result.ids)
    assert len({len(result.ids) for result in results}) > 1


def test_every_piece_is_written_at_its_step(exact: Transformer) -> None:
    with translator_of(exact, suppress=(0, 1, 2), min_tokens=9) as translator:
        engine, steps = translator.engine, []
        assert isinstance(engine, Counting)
        result = translator.stream("w5 w6", lambda piece: steps.append(engine.stepped))
    assert steps == list(range(1, 10)) and len(result.ids) == 9


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_only_whole_characters_are_streamed(byte_fallback: bool) -> None:
    """Pieces that are single bytes, or blanks whose fate the next piece decides."""
    from sentencepiece import SentencePieceTrainer

    file = io.BytesIO()
    SentencePieceTrainer.Train(
        sentence_iterator=iter(["a man in a blue shirt", "ein Mann in einem Hemd", "weiße Büsche", "a a b b"]),
        model_writer=file,
        model_type="bpe",
        vocab_size=310 if byte_fallback else 60,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        **{"unk_id": 0, "pad_id": 1, "bos_id": BOS, "eos_id": EOS, "minloglevel": 2},
    )
    pieces = SentencePiece(file.getvalue())
    # The model has more entries than the tokenizer, as one whose vocabulary is padded.
    config = small_config(src_vocab=pieces.size + 5, tgt_vocab=pieces.size + 5, share_embeddings="none")
    model = Transformer(config).init_weights(5).double().eval()
    text = "ein 中文 🙂 Büsche" if byte_fallback else "ein Mann  a"
    late = 0
    for seed in range(12):
        options = DecodeOptions(max_tokens=24, sampling=True, seed=seed)
        with Translator(EagerEngine(model), Tokenizers(pieces, pieces), options) as translator:
            written, result = streamed(translator, "a man", text)
            assert "".join(written) == result.text == pieces.decode([i for i in result.ids if i < pieces.size])
            assert result.text.startswith(text.replace("  ", " "))
            assert not any(piece == "" or piece.endswith("\ufffd") for piece in written[:-1])
            late += len(result.ids) - len(written)
    assert late > 0


def test_nothing_forbidden_is_streamed(exact: Transformer) -> None:
    """The output is stuck: it may not end yet, and nothing may follow."""
    with translator_of(exact, ["w5 w6"], min_tokens=6) as translator:
        pieces, result = streamed(translator, "w7 w8")
        assert pieces == ["w5", " w6"] and result.text == "w5 w6" and not result.finished
        assert same(result, translator.translate(["w7 w8"])[0], 1e-9)
        assert streamed(translator, "  ") == ([], Result("", [], 0.0))


@pytest.mark.parametrize(
    "options", [{"beams": 2}, {"sampling": True, "n_best": 2}, {"stop": "exact"}, {"patience": 2.0}], ids=str
)
def test_streaming_of_several_outputs_is_refused(exact: Transformer, options: dict[str, Any]) -> None:
    with translator_of(exact, **options) as translator, pytest.raises(ConfigError, match="streaming shows one output"):
        translator.stream("w5", print)


# Scores


@pytest.mark.parametrize(
    "options",
    [*MODES.values(), {"beams": 3, "repetition_penalty": 1.3, "no_repeat_ngram": 2}, {"max_tokens": 3}],
    ids=str,
)
def test_scores_of_outputs_are_those_that_decoding_reports(bundle: Path, exact: Transformer, options: Any) -> None:
    """In 32 bits on ONNX Runtime, whose outputs are all cut off, and with outputs that end."""
    lines = [line for line in make_lines(30) if line]
    doubled = translator_of(exact, **options)
    with doubled, load(bundle, threads=1, **{"max_tokens": 9, **options}) as translator:
        for each, tolerance in ((translator, 1e-5), (doubled, 1e-9)):
            sources = [each.tokenizers.source_ids(line) for line in lines]
            for source, result in zip(sources, each.translate(lines), strict=True):
                for output in [result, *result.alternatives]:
                    target = [*output.ids, *([EOS] if output.finished else [])]
                    (values,) = score(each.engine, make_batch([source], 1), [target])
                    assert values.sum() == pytest.approx(output.score, abs=tolerance) and len(values) == len(target)


@pytest.mark.parametrize("mode", MODES)
def test_scores_of_texts_are_those_that_decoding_reports(exact: Transformer, mode: str) -> None:
    lines = [f"w{i}" for i in range(4, VOCAB)]
    with translator_of(exact, suppress=(0, 1, 2), **MODES[mode]) as translator:
        ended = [
            (line, each)
            for line, result in zip(lines, translator.translate(lines), strict=True)
            for each in [result, *result.alternatives]
            if each.finished
        ]
        assert len(ended) > 5
        found = translator.score([line for line, _ in ended], [f" {each.text}\n" for _, each in ended])
        for (_, each), values in zip(ended, found, strict=True):
            assert len(values) == len(each.ids) + 1
            assert sum(values) == pytest.approx(each.score, abs=1e-9)


def test_scores_are_the_same_in_every_batch(exact: Transformer) -> None:
    sources, targets = make_lines(25), make_lines(30)[::-1][:25]
    with translator_of(exact) as translator:
        together = translator.score(sources, targets)
        translator.settings = replace(translator.settings, batch_tokens=1)
        alone = [translator.score([source], [target])[0] for source, target in zip(sources, targets, strict=True)]
    assert all(a == pytest.approx(b, abs=1e-9) for a, b in zip(alone, together, strict=True))
    assert [len(values) for values in together] == [len(target.split()) + 1 for target in targets]


# What is refused


def test_too_long_line_is_named(translator: Translator) -> None:
    with pytest.raises(LimitError, match="line 12: a source of 31 tokens exceeds the limit of 24"):
        list(translator.results(["w5", "w6 " * 30], first=10))
    with pytest.raises(LimitError, match="line 12: a source of 31 tokens exceeds the limit of 24"):
        translator.stream("w6 " * 30, print, number=11)
    with pytest.raises(LimitError, match="line 7: a source of 31 tokens"):
        translator.score(["w5", "w6 " * 30], ["w5", "w5"], first=5)
    with pytest.raises(LimitError, match="line 7: a target of 25 tokens exceeds the limit of 24"):
        translator.score(["w5", "w5"], ["w6 " * 23, "w6 " * 24], first=5)
    with pytest.raises(ConfigError, match="2 sources, 1 targets"):
        translator.score(["w5", "w5"], ["w6"])


def test_results_before_a_bad_line_are_kept(exact: Transformer) -> None:
    lines = [*make_lines(10), "w6 " * 100, "w5", "w6 " * 200]
    with translator_of(exact) as translator:
        found = []
        with pytest.raises(LimitError, match="line 14: a source of 101 tokens"):
            for result in translator.results(lines, first=3):
                found.append(result)
        for ours, theirs in zip(found, translator.translate(lines[:10]), strict=True):
            assert same(ours, theirs, 1e-9)
        assert isinstance(translator.engine, Counting)
        encoded = translator.engine.encoded
        with pytest.raises(LimitError, match="line 11: a source of 101 tokens"):
            translator.translate(lines)
        assert translator.engine.encoded == encoded, "nothing is translated for a list that cannot be returned"


@pytest.mark.parametrize("workers", [1, 2])
def test_results_before_a_line_without_numbers_are_kept(model: Transformer, workers: int) -> None:
    """However the lines were put together."""
    spoiled = Transformer(model.config).eval()
    spoiled.load_state_dict(model.state_dict())
    spoiled.src_embedding.weight.data[9] = float("nan")
    lines = [*make_lines(4), "w5 w6 w7", "w9", "w5", "w6 w9 w6 w5 w7 w8", "w6"]
    options = DecodeOptions(max_tokens=9)
    settings = TranslatorSettings(batch_tokens=4096, workers=workers)
    with Translator(EagerEngine(spoiled), Tokenizers(WORDS, WORDS), options, settings) as translator:
        found = []
        with pytest.raises(NotNumbers, match=r"^request 9: NaN or infinite log-probabilities at token 1"):
            for result in translator.results(lines, first=3):
                found.append(result)
        assert [result.text for result in found] == [result.text for result in translator.translate(lines[:5])]
        with pytest.raises(NotNumbers, match=r"^request 1: "):
            translator.score(["w9"], ["w5"])
        # Told instead of raised, they count as empty, and so do lines that are too long.
        told: dict[int, str] = {}
        lines[6:6] = ["w6 " * 30]
        results = list(
            translator.results(lines, first=3, refused=lambda number, error: told.update({number: str(error)}))
        )
        assert sorted(told) == [8, 9, 11] and told[9].startswith("line 10: a source of 31 tokens")
        assert told[8].startswith("request 9: NaN or infinite log-probabilities") and "request 12" in told[11]
        blank = ["" if number in told else line for number, line in enumerate(lines, 3)]
        assert [result.text for result in results] == [result.text for result in translator.translate(blank)]


def test_requests_are_split_as_for_other_workers(exact: Transformer) -> None:
    """Batches are those of as many workers as are named, whoever decodes them."""
    seen = []
    for workers, least in ((3, 0), (1, 3), (2, 3), (1, 0)):
        with translator_of(exact) as translator:
            translator.settings = replace(translator.settings, workers=workers, least_batches=least)
            assert isinstance(translator.engine, Counting)
            translator.translate(make_lines(9))
            seen.append(translator.engine.encoded)
    assert seen[0] == seen[1] == seen[2] == 3 and seen[3] == 1


def test_bad_ids_name_their_source(translator: Translator) -> None:
    for bad in (VOCAB, -1, 2**40):
        with pytest.raises(LimitError, match=f"line 2: token id {bad} is outside the source vocabulary of {VOCAB}"):
            translator.generate([[5, EOS], [bad, EOS]])


def test_closed_translator_says_so(bundle: Path) -> None:
    translator = load(bundle, threads=1)
    translator.close()
    translator.close()
    for use in (
        lambda: translator.translate(["w5"]),
        lambda: translator.translate([]),
        lambda: list(translator.results(["w5"])),
        lambda: translator.generate([[5, EOS]]),
        lambda: translator.stream("w5", print),
        lambda: translator.score(["w5"], ["w5"]),
        lambda: translator.score([], []),
    ):
        with pytest.raises(TformerError, match="the translator is not open: call open"):
            use()
    with translator:
        assert translator.translate(["w5"])


def test_one_text_is_not_several(translator: Translator) -> None:
    for name, use in {
        "lines": lambda text: translator.translate(text),
        "lines ": lambda text: list(translator.results(text)),
        "prefixes": lambda text: translator.translate(["w5"] * 9, text),
        "sources": lambda text: translator.score(text, ["w5"] * 9),
        "targets": lambda text: translator.score(["w5"] * 9, text),
        "sources ": lambda text: translator.generate(text),
        "allowed": lambda text: translator_of(Transformer(small_config()), text),
    }.items():
        for bad, kind in (("forty-two", "str"), (b"forty-two", "bytes")):
            with pytest.raises(DataError, match=f"^{name.strip()}: a single {kind}, not several: put it into a list"):
                use(bad)
    with pytest.raises(DataError, match="lines: a single NoneType"):
        translator.translate(None)  # type: ignore[arg-type]
    assert translator.translate(line for line in ["w5"]) == translator.translate(("w5",)), "any iterable will do"
    assert translator.score(iter(["w5"]), iter(["w6"])) == translator.score(["w5"], ["w6"])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (None, "NoneType is no text: give a str"),
        (b"w5", "bytes is no text: give a str"),
        (5, "int is no text: give a str"),
        (["w5"], "list is no text: give a str"),
        ("w5 \udcff", "character 4 is a lone surrogate: give valid Unicode"),
    ],
    ids=repr,
)
def test_what_is_no_text_is_named(translator: Translator, bad: Any, words: str) -> None:
    for use in (
        lambda: translator.translate(["w5", bad]),
        lambda: list(translator.results(["w5", bad])),
        lambda: translator.score(["w5", bad], ["w5", "w5"]),
        lambda: translator.score(["w5", "w5"], ["w5", bad]),
        lambda: translator.stream(bad, print, number=1),
    ):
        with pytest.raises(DataError, match=f"^line 2: {words}$"):
            use()
    for use in (
        lambda: translator.translate(["w5", "w5"], ["", bad]),
        lambda: translator.stream("w5", print, bad, number=1),
    ):
        with pytest.raises(DataError, match=f"^line 2, prefix: {words}$"):
            use()
    with pytest.raises(DataError, match=f"^allowed, line 2: {words}$"):
        translator_of(Transformer(small_config()), ["w5", bad])


def test_what_the_vocabulary_lacks_is_refused_where_it_would_be_an_output(exact: Transformer) -> None:
    with pytest.raises(DataError, match=r"^allowed, line 2: 'zebra' is not in the vocabulary"):
        translator_of(exact, ["w5", "w5 zebra", "lion"])
    with translator_of(exact) as translator:
        found = []
        with pytest.raises(DataError, match=r"^line 5, prefix: 'zebra' is not in the vocabulary"):
            for result in translator.results(["w5", "w6", "w7", "w8"], ["", "w9", "w9 zebra", ""], first=2):
                found.append(result)
        assert [result.ids[:1] for result in found][1] == [9] and len(found) == 2
        with pytest.raises(DataError, match=r"^line 4, prefix: 'lion' is not"):
            translator.stream("w5", print, "lion", number=3)
        assert translator.score(["zebra"], ["zebra"])[0], "what exists can be scored"


def test_a_prefix_with_an_end_token_is_a_bad_line(exact: Transformer) -> None:
    """Whose length does not matter: results of the lines before it come first."""
    model = Counting(exact)
    options, one = DecodeOptions(end_ids=(9,), max_tokens=9), TranslatorSettings(batch_tokens=1)
    with Translator(model, Tokenizers(WORDS, WORDS), options, one).open() as translator:
        found = translator.results(["w5", "w6 w7", "w6 " * 5], ["", "w8", "w7 w9"])
        next(found)
        assert next(found).ids[0] == 8
        with pytest.raises(LimitError, match=r"^line 3, prefix: a forced token is an end token: leave it out"):
            next(found)


def test_a_prefix_beyond_the_longest_output_is_a_bad_line(exact: Transformer) -> None:
    """It was cut to max_tokens, and by a forced end even called finished."""
    tokenizers, lines = Tokenizers(WORDS, WORDS), ["w5", "w6 w7", "", "w6 w7", "w5"]
    begins = ["w9 w10 w11", "w9", "w9 " * 9, "w9 w10 w11 w12", "w9"]
    for forced_end, most in ((False, 3), (True, 4)):
        options = DecodeOptions(max_tokens=most, forced_end=forced_end)
        with Translator(Counting(exact), tokenizers, options, TranslatorSettings(batch_tokens=1)).open() as translator:
            found = translator.results(lines, begins)
            assert next(found).ids == [9, 10, 11] and next(found).ids[0] == 9 and next(found).ids == []
            words = (
                f"4 forced tokens{' and the forced end' if forced_end else ''} do not fit into {most}, the most that"
            )
            with pytest.raises(LimitError, match=f"^line 4: {words} max_tokens, max_ratio and the model's positions"):
                next(found)
            bad: dict[int, Any] = {}
            [*_, last] = translator.results(lines, begins, refused=bad.__setitem__)
            assert list(bad) == [3] and last.ids[0] == 9
    options = DecodeOptions(first_ids=(9, 10), max_ratio=0.5)
    with (
        Translator(Counting(exact), tokenizers, options).open() as translator,
        pytest.raises(LimitError, match=r"^line 2: 2 forced tokens do not fit into 1, the most that max_tokens"),
    ):
        translator.translate(["w5 w6 w7", "w5"])


@pytest.mark.parametrize(
    "source", [[5.7, EOS], [5.0, EOS], [True, EOS], [None], "ab", 5, None, [[5]], [np.float32(5)]], ids=repr
)
def test_token_ids_are_whole_numbers(translator: Translator, source: Any) -> None:
    with pytest.raises(DataError, match=r"^line 2: .* is no list of token ids: give whole numbers$"):
        translator.generate([[5, EOS], source])
    sources = [[5, 6, EOS]]
    assert translator.generate(np.array(sources, np.int32)) == translator.generate(sources)
    assert translator.generate([(token for token in sources[0])]) == translator.generate(sources)  # type: ignore[list-item]


@pytest.mark.parametrize("value", [-1, 1.5, True, "2", None, 10**6, 10**30], ids=repr)
def test_counts_have_bounds(bundle: Path, value: Any) -> None:
    for name in ("threads", "workers", "batch_tokens", "max_line_bytes"):
        if (name, value) in {("batch_tokens", 10**6), ("max_line_bytes", 10**6), ("max_line_bytes", None)}:
            continue
        with pytest.raises(ConfigError, match=rf"^{name}=.*: must be a whole number from [01] to \d+$"):
            load(bundle, **{name: value})
    with pytest.raises(ConfigError, match="first="):
        load(bundle, threads=1).results(["w5"], first=value if value not in (10**6,) else -1)


def test_counts_from_none_up(bundle: Path) -> None:
    for name in ("workers", "max_line_bytes"):
        with pytest.raises(ConfigError, match=f"^{name}=0: must be a whole number from 1 to"):
            load(bundle, **{name: 0})  # type: ignore[arg-type]
    for options in ({"backend": None}, {"variant": 3}, {"device": 1}, {"checkpoint": 5}):
        with pytest.raises(ConfigError, match="must be a"):
            load(bundle, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bundle=None: must be a folder's path"):
        load(None)  # type: ignore[arg-type]


def test_the_longest_line_is_that_of_allowed_outputs_too(exact: Transformer) -> None:
    settings = TranslatorSettings(allowed=["w5", "w5 w6 w7"], max_line_bytes=5)
    with pytest.raises(DataError, match=r"^allowed, line 2: longer than 5 bytes: split it, or raise max_line_bytes$"):
        Translator(Counting(exact), Tokenizers(WORDS, WORDS), settings=settings)


def test_decoding_options_that_are_checked_already_open_a_translator(bundle: Path) -> None:
    decoding = Decoding.over({"beams": 3}, {"max_tokens": 4})
    asked: dict[str, Any]
    for asked, beams in (({}, 3), ({"beams": 2}, 2)):
        with load(bundle, threads=1, decoding=decoding, **asked) as translator:
            assert (translator.options.beams, translator.options.max_tokens) == (beams, 4)
    with pytest.raises(ConfigError, match="decoding=3: must be a table of decoding options"):
        load(bundle, decoding=3, beams=2)


def test_targets_beyond_the_vocabulary_name_their_line(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    with translator_of(model) as translator:
        monkeypatch.setattr(Tokenizers, "target_ids", lambda self, text: [VOCAB if text == "w6" else 5, EOS])
        with pytest.raises(LimitError, match=f"^line 2: token id {VOCAB} is outside the target vocabulary of {VOCAB}$"):
            translator.score(["w5", "w5"], ["w5", "w6"])


def test_a_translator_that_is_interrupted_while_it_opens_leaves_its_device(
    exact: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, left = Counting(exact), list[Any]()
    monkeypatch.setattr(Counting, "__exit__", lambda self, *why: left.append(self))
    monkeypatch.setattr(Translator, "_check", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Translator(engine, Tokenizers(WORDS, WORDS)).open()
    assert left == [engine]


def test_eager_gives_back_the_threads_of_pytorch(bundle: Path) -> None:
    before = torch.get_num_threads()
    with load(bundle, backend="eager", threads=before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    make_engine("eager", open_bundle(bundle), threads=before + 1)
    assert torch.get_num_threads() == before, "nothing is taken before the engine is entered"


def test_endless_lines_are_not_split_into_tokens(exact: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes count, not their characters."""
    seen: list[str] = []
    encode = Words.encode
    monkeypatch.setattr(Words, "encode", lambda self, text: seen.append(text) or encode(self, text))  # type: ignore[func-returns-value]
    with translator_of(exact) as translator:
        translator.settings = replace(translator.settings, max_line_bytes=10)
        for line in ("w" * 11, "ü" * 6, " " * 11):
            words = r"^line 3: longer than 10 bytes: split it, or raise max_line_bytes$"
            results = translator.results(["w5", line, "w7"], first=1)
            assert next(results).ids
            with pytest.raises(DataError, match=words):
                next(results)
            for use in (
                lambda line=line: translator.translate(["w5", "w5", line]),
                lambda line=line: translator.score(["w5", "w5", line], ["w5"] * 3),
                lambda line=line: translator.score(["w5"] * 3, ["w5", "w5", line]),
                lambda line=line: translator.stream(line, print, number=2),
            ):
                with pytest.raises(DataError, match=words):
                    use()
            with pytest.raises(DataError, match="line 1, prefix: longer than 10 bytes"):
                translator.translate(["w5"], [line])
        assert translator.translate(["ü" * 5, "w5 w6 w7 8"]) and not [text for text in seen if len(text) > 10]
        assert "w7" not in seen, "nor what stands behind one"
    with pytest.raises(DataError, match="line 1: longer than 1048576 bytes"), translator_of(exact) as translator:
        translator.translate(["w" * (1 << 20) + "w"])


# Backends


@pytest.mark.parametrize("mode", MODES)
def test_eager_and_ort_translators_agree(bundle: Path, translator: Translator, mode: str) -> None:
    lines = [" ".join(f"w{4 + (i * j) % 50}" for j in range(1, 2 + i % 20)) for i in range(40)]
    options = dataclasses.asdict(DecodeOptions(max_tokens=9, **MODES[mode]))
    with load(bundle, "eager", **options) as eager, load(bundle, threads=1, **options) as ort:
        for ours, theirs in zip(eager.translate(lines), ort.translate(lines), strict=True):
            assert same(ours, theirs, 1e-4)
