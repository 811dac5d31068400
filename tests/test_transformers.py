"""Decoding against `generate` of transformers, on the log-probabilities of its own small random models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers loads: random weights, nothing is fetched

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LogitsProcessorList,
    MarianConfig,
    MarianMTModel,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tformer_deploy.decoding import DecodeOptions, Hypothesis, decode
from tformer_deploy.decoding.sampling import draw
from tformer_deploy.engines.base import Floats, Ints, Limits, Scores, check_request, check_step
from tformer_deploy.model.config import ModelConfig

from .params import long_but
from .plain_decoding import make_batch

PAD, BOS, EOS, VOCAB = 1, 2, 3, 20
SOURCES = [(9, 4, 17, 3), (5, 11, 3), (19, 18, 7, 7, 16, 12, 3), (8, 3), (13, 6, 15, 10, 3), (14, 14, 3)]
TOLERANCE = 1e-5
"""Theirs adds in float32."""


@dataclass
class ModelState:
    encoded: Tensor
    mask: Tensor
    tokens: Tensor
    """(B * K, t), the start token first."""


class ModelEngine:
    """A model of transformers; runs the whole prefix at every step."""

    attention = False

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = ModelConfig(
            src_vocab=VOCAB, tgt_vocab=VOCAB, bos_id=model.config.decoder_start_token_id, pad_id=PAD, eos_id=EOS
        )
        self.limits = Limits(batch=64, src_tokens=32, tgt_tokens=32, beams=64)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Any = None) -> ModelState:
        check_request(src_ids, src_lengths, self.config, self.limits)
        mask = torch.from_numpy((np.arange(src_ids.shape[1]) < src_lengths[:, None]).astype(np.int64))
        encoder = self.model.get_encoder()
        encoded = encoder(input_ids=torch.from_numpy(src_ids).long(), attention_mask=mask).last_hidden_state
        return ModelState(encoded, mask, torch.empty(len(src_ids), 0, dtype=torch.long))

    def best(self, beams: int, state: Any = None) -> int:
        return 0

    def step(self, tokens: Ints, state: ModelState, full: bool = False, attention: bool = False) -> Scores:
        check_step(tokens.shape[1], state.tokens.shape[1], self.limits)
        state.tokens = torch.cat((state.tokens, torch.from_numpy(tokens).long().reshape(-1, 1)), 1)
        logits = self.model(
            encoder_outputs=(state.encoded.repeat_interleave(tokens.shape[1], 0),),
            attention_mask=state.mask.repeat_interleave(tokens.shape[1], 0),
            decoder_input_ids=state.tokens,
        ).logits[:, -1]
        log_probs = logits.log_softmax(-1).numpy().reshape(*tokens.shape, -1)
        best = log_probs.argmax(2)[:, :, None].astype(np.int32)
        return Scores(best, np.take_along_axis(log_probs, best, 2), log_probs)

    def reorder(self, state: ModelState, parents: Ints, sentences: Ints | None = None) -> None:
        state.tokens = state.tokens[torch.from_numpy(parents).long().ravel()]
        if sentences is not None:
            state.encoded, state.mask = state.encoded[sentences], state.mask[sentences]

    def cross_keys_values(self, state: ModelState) -> list[Floats]:
        return []

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        return {}


def make_model(kind: Any, config: Any, start: int, seed: int) -> Any:
    """Marian starts with pad, BART with eos; both end by eos. Larger weights than a new model's make outputs differ."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": 16,
        "max_position_embeddings": 40,
        "forced_eos_token_id": None,
        "tie_word_embeddings": False,
    }
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 24}
    model = kind(config(**sizes, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=start))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            inner = name.startswith("model.") and "layers" in name
            scale = parameter.shape[1] ** -0.5 if inner else 0.4 if name == "lm_head.weight" else 1.0
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    model.final_logits_bias[0, EOS] += 1.0
    return model.eval()


MODELS = {
    "marian": lambda: make_model(MarianMTModel, MarianConfig, PAD, 8),
    "bart": lambda: make_model(BartForConditionalGeneration, BartConfig, EOS, 4),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.set_num_threads(1)
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def marian() -> Any:
    return MODELS["marian"]()


def generate(model: Any, beams: int, **settings: Any) -> list[list[Hypothesis]]:
    """What transformers finds: ids, values and, where greedy, scores."""
    batch = make_batch(SOURCES)
    settings = {"max_new_tokens": 12, "bad_words_ids": [[PAD]], "eos_token_id": EOS, **settings}
    prompt = settings["decoder_input_ids"].shape[1] if "decoder_input_ids" in settings else 1
    found = model.generate(
        input_ids=torch.from_numpy(batch.src_ids).long(),
        attention_mask=torch.from_numpy(batch.src_ids != PAD).long(),
        num_beams=beams,
        num_return_sequences=beams,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    ends = np.atleast_1d(settings["eos_token_id"])
    outputs = []
    if beams == 1:
        values = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
        scores = torch.where(values.isinf(), 0, values).sum(1).tolist()
    else:
        scores = found.sequences_scores.tolist()
    for tokens, score in zip(found.sequences[:, prompt:].tolist(), scores, strict=True):
        end = next((i for i, token in enumerate(tokens) if token in ends), None)
        outputs.append(Hypothesis(tokens[:end], None if end is None else tokens[end], score, score))
    return [outputs[i : i + beams] for i in range(0, len(outputs), beams)]


def ours(model: Any, **settings: Any) -> list[list[Hypothesis]]:
    options = DecodeOptions(**{"max_tokens": 12, "suppress": (PAD,), "n_best": settings.get("beams", 1), **settings})
    with torch.inference_mode():
        return decode(ModelEngine(model), make_batch(SOURCES), options)


def check_equal(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert [(h.ids, h.finished) for h in a] == [(h.ids, h.finished) for h in b]
        assert [h.value for h in a] == pytest.approx([h.value for h in b], rel=2e-6, abs=TOLERANCE)


def test_greedy_search(model: Any) -> None:
    found = ours(model)
    for [a], [b] in zip(found, generate(model, 1), strict=True):
        assert (a.ids, a.finished) == (b.ids, b.finished)
    assert len({len(hypothesis.ids) for [hypothesis] in found}) > 2, "the model must stop at different steps"


STOPS: dict[str, Any] = {"count": True, "estimate": False, "exact": "never"}


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("stop", STOPS)
def test_beam_search(model: Any, stop: Any, length_penalty: float) -> None:
    """Batches of different lengths; where unfinished outputs at the longest length compete with finished ones.

    With "never" and a negative penalty, transformers compares at length t, `exact` at t + 1: fewer steps, same outputs.
    """
    for beams in (2, 4, 5):
        expected = generate(model, beams, length_penalty=length_penalty, early_stopping=STOPS[stop])
        check_equal(ours(model, beams=beams, length_penalty=length_penalty, stop=stop), expected)


def test_the_stop_rules_differ_here() -> None:
    """Else the tests above would not tell them apart."""
    bart = MODELS["bart"]()
    found = [[h.ids for hypotheses in ours(bart, beams=4, stop=stop) for h in hypotheses] for stop in STOPS]
    assert found[0] != found[1] != found[2] != found[0]


HALF = list(range(4, VOCAB, 2))
WORDS = [token for token in range(VOCAB) if token not in (PAD, EOS)]
RULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"min_tokens": 7}, {"min_new_tokens": 6}),
    ({"max_tokens": 5}, {"max_new_tokens": 5}),
    ({"min_tokens": 5, "max_tokens": 5}, {"min_new_tokens": 4, "max_new_tokens": 5}),
    ({"no_repeat_ngram": 2}, {"no_repeat_ngram_size": 2}),
    ({"no_repeat_ngram": 3}, {"no_repeat_ngram_size": 3}),
    ({"suppress": (PAD, *HALF)}, {"suppress_tokens": HALF}),
    ({"suppress": (PAD, *HALF)}, {"bad_words_ids": [[PAD], *([token] for token in HALF)]}),
    (
        {"bad_words": (*((token, token) for token in WORDS), (4, 6, 8))},
        {"bad_words_ids": [[PAD], *([token, token] for token in WORDS), [4, 6, 8]]},
    ),
    ({"end_ids": (EOS, *HALF)}, {"eos_token_id": [EOS, *HALF]}),
]


@pytest.mark.parametrize(("settings", "theirs"), RULES, ids=str)
@pytest.mark.parametrize("beams", [1, 4])
def test_rules_for_tokens(model: Any, beams: int, settings: dict[str, Any], theirs: dict[str, Any]) -> None:
    found = ours(model, beams=beams, **settings)
    assert found != ours(model, beams=beams), "the rule must matter"
    if beams > 1:
        check_equal(found, generate(model, beams, early_stopping=True, **theirs))
    else:
        assert [h.ids for [h] in found] == [h.ids for [h] in generate(model, beams, **theirs)]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_of_a_beam(marian: Any, penalty: float) -> None:
    """On log-probabilities, as ours. Of a suppressed start token nobody sees that transformers penalises it too."""
    settings = {"no_repeat_ngram_size": 3, "repetition_penalty": penalty, "early_stopping": True}
    found = ours(marian, beams=4, no_repeat_ngram=3, repetition_penalty=penalty)
    check_equal(found, generate(marian, 4, **settings))
    assert found != ours(marian, beams=4, no_repeat_ngram=3)


def test_repetition_penalty_differs_where_outputs_start_with_the_end_token() -> None:
    """Transformers counts the start token as produced, so that for BART it penalises the end of outputs. Ours does not.

    Another start token shows that nothing else differs.
    """
    bart = MODELS["bart"]()
    theirs = generate(bart, 4, repetition_penalty=1.5, early_stopping=True)
    found = ours(bart, beams=4, repetition_penalty=1.5)
    assert [h.ids for a in found for h in a] != [h.ids for a in theirs for h in a]
    bart.config.decoder_start_token_id = bart.generation_config.decoder_start_token_id = PAD
    check_equal(
        ours(bart, beams=4, repetition_penalty=1.5), generate(bart, 4, repetition_penalty=1.5, early_stopping=True)
    )


def test_repetition_penalty_differs_in_greedy_search(marian: Any) -> None:
    """Transformers applies it to logits there, to log-probabilities in a beam; ours to log-probabilities in both."""
    theirs = generate(marian, 1, repetition_penalty=1.5)
    assert [h.ids for [h] in ours(marian, repetition_penalty=1.5)] != [h.ids for [h] in theirs]


def test_forced_first_token(model: Any) -> None:
    """The same length counts, but transformers scores a forced_bos_token_id 0 and ours what the model says of it.

    So the order of outputs is the same where lengths do not count.
    """
    settings = {"length_penalty": 0.0, "early_stopping": True}
    theirs = generate(model, 4, forced_bos_token_id=8, **settings)
    found = ours(model, beams=4, first_ids=(8,), length_penalty=0.0)
    alone = ours(model, max_tokens=1, first_ids=(8,))
    for a, b, [first] in zip(found, theirs, alone, strict=True):
        assert [h.ids for h in a] == [h.ids for h in b]
        assert [h.value for h in a] == pytest.approx([h.value + first.score for h in b], abs=TOLERANCE)


def test_prompts(model: Any) -> None:
    """Transformers counts decoder_input_ids neither in scores nor in lengths, limits included; ours in all of them."""
    start = model.config.decoder_start_token_id
    prompt = torch.tensor([[start, 8, 10]]).repeat(len(SOURCES), 1)
    settings = {"length_penalty": 0.0, "early_stopping": True, "min_new_tokens": 3, "max_new_tokens": 10}
    theirs = generate(model, 4, decoder_input_ids=prompt, **settings)
    found = ours(model, beams=4, first_ids=(8, 10), length_penalty=0.0, min_tokens=6)
    alone = ours(model, max_tokens=2, first_ids=(8, 10))
    for a, b, [first] in zip(found, theirs, alone, strict=True):
        assert [h.ids for h in a] == [[8, 10, *h.ids] for h in b]
        assert [h.value for h in a] == pytest.approx([h.value + first.score for h in b], abs=TOLERANCE)


@pytest.mark.parametrize("temperature", long_but([1.0, 0.5, 1.8], "0.5"))
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.05}], ids=str
)
def test_filters_of_sampling(temperature: float, filters: dict[str, Any]) -> None:
    """Evenly spaced numbers draw every token as often as the softmax behind transformers' filters says."""
    kinds: dict[str, Any] = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    filtering = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    filtering += [kinds[name](value) for name, value in filters.items()]
    logits = 2 * torch.randn(30, VOCAB, generator=torch.Generator().manual_seed(1))
    nothing: Any = torch.empty(30, 0, dtype=torch.long)
    expected = filtering(nothing, logits).softmax(-1).numpy()
    options = DecodeOptions(sampling=True, temperature=temperature, **filters)
    grid = np.broadcast_to((np.arange(1000) + 0.5) / 1000, (30, 1000))
    scores = logits.log_softmax(-1).numpy()[:, None].repeat(1000, 1)
    for tokens, shares in zip(draw(scores, grid, options)[0], expected, strict=True):
        assert np.abs(np.bincount(tokens, minlength=VOCAB) - 1000 * shares).max() <= 1.01
        assert (shares[np.unique(tokens)] > 0).all()
