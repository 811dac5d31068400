"""OpenAI's protocol, driven by the package `openai`: answers are those of `Translator.translate`."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .serving import BROKEN, Watched, counted, post, translated, translator_of, wait_for

openai = pytest.importorskip("openai")
LONG = {"max_tokens": 3}
SAMPLES: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 5}


@pytest.fixture
def api(client: Any) -> Iterator[Any]:
    with connected(client) as found:
        yield found


def connected(client: Any, key: str = "none") -> Any:
    """OpenAI's client of the server that httpx's client is of."""
    return openai.OpenAI(base_url=f"{client.base_url}/v1".replace("//v1", "/v1"), api_key=key, max_retries=0)


def expected(text: str, prefix: str = "", **options: Any) -> Any:
    with translator_of(Watched()) as translator:
        [result] = translator.translate([text], [prefix], **options)
        return result


def chat(api: Any, text: str = "w7 w8", **more: Any) -> Any:
    messages = more.pop("messages", [{"role": "user", "content": text}])
    return api.chat.completions.create(model=more.pop("model", "numbers"), messages=messages, **more)


@pytest.mark.parametrize(
    ("sent", "options"),
    [
        ({}, {}),
        ({"temperature": 0, "seed": 3, "frequency_penalty": 0, "user": "x", "stop": None}, {}),
        (LONG, LONG),
        (SAMPLES, {"sampling": True, **SAMPLES}),
        ({"n": 3}, {"beams": 3, "n_best": 3}),
        ({"n": 2, **SAMPLES}, {"n_best": 2, "sampling": True, **SAMPLES}),
        ({"n": 2, "extra_body": {"beams": 4, "length_penalty": 0.5}}, {"beams": 4, "n_best": 2, "length_penalty": 0.5}),
    ],
    ids=lambda value: "-".join(map(str, value)) or "none",
)
def test_prompts_and_messages_are_translated(api: Any, sent: dict[str, Any], options: dict[str, Any]) -> None:
    result = expected("w7 w8", **options)
    outputs = [result, *result.alternatives]
    texts, reasons = [each.text for each in outputs], ["stop" if each.finished else "length" for each in outputs]
    completion = api.completions.create(model="numbers", prompt="w7 w8", **sent)
    answer = chat(api, **sent)
    assert [choice.text for choice in completion.choices] == texts
    assert [choice.message.content for choice in answer.choices] == texts
    for found in (completion, answer):
        assert [(choice.index, choice.finish_reason) for choice in found.choices] == list(enumerate(reasons))
        assert found.model == "numbers" and found.usage.prompt_tokens == 3  # the end among them
        assert found.usage.completion_tokens == sum(len(each.ids) for each in outputs)
        assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert (answer.object, completion.object) == ("chat.completion", "text_completion")
    for streamed in (
        list(api.completions.create(model="numbers", prompt="w7 w8", stream=True, **sent)),
        list(chat(api, stream=True, **sent)),
    ):
        pieces, ends = [""] * len(outputs), [""] * len(outputs)
        for chunk in streamed:
            [choice] = chunk.choices
            pieces[choice.index] += (choice.text if hasattr(choice, "text") else choice.delta.content) or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
        assert (pieces, ends) == (texts, reasons) and len({chunk.id for chunk in streamed}) == 1


def test_a_stream_has_a_chunk_for_each_piece_and_its_usage_if_asked(api: Any) -> None:
    chunks = list(chat(api, stream=True, stream_options={"include_usage": True}))
    result = expected("w7 w8")
    words = len(result.text.split())
    assert words > 2 and len(chunks) == words + 3 and chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(result.ids)
    assert chunks[-1].usage.prompt_tokens == 3 and all(chunk.usage is None for chunk in chunks[:-1])


def test_prompts_may_be_several(api: Any) -> None:
    found = api.completions.create(model="b", prompt=["w7", "w8 w9"], n=2)
    results = [expected(text, beams=2, n_best=2) for text in ("w7", "w8 w9")]
    assert [choice.text for choice in found.choices] == [
        output.text for result in results for output in (result, *result.alternatives)
    ]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3] and found.usage.prompt_tokens == 5


def test_the_last_user_message_is_translated_and_an_assistants_begins_the_output(api: Any) -> None:
    earlier = [
        {"role": "system", "content": "w30"},
        {"role": "user", "content": "w31"},
        {"role": "assistant", "content": "w32"},
    ]
    parts = [{"type": "text", "text": "w7 "}, {"type": "text", "text": "w8"}]
    last, begun = {"role": "user", "content": parts}, {"role": "assistant", "content": "w9 w9"}
    assert chat(api, messages=[*earlier, last]).choices[0].message.content == expected("w7 w8").text
    [choice] = chat(api, messages=[*earlier, last, begun]).choices
    assert choice.message.content == expected("w7 w8", "w9 w9").text and choice.message.content.startswith("w9 w9")


def test_models_are_listed(api: Any, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]) -> None:
    assert [model.id for model in api.models.list()] == ["numbers", "b"]
    assert api.models.retrieve("b").id == "b" and chat(api).system_fingerprint is None
    with pytest.raises(openai.NotFoundError, match="did you mean 'numbers'"):
        api.models.retrieve("numbrs")
    version = hashlib.sha256(b"").hexdigest()
    monkeypatch.setattr("tformer_deploy.serve.models.version_of", lambda _: version)
    with connected(serve()) as other:
        assert chat(other).system_fingerprint == version


BAD: list[tuple[dict[str, Any], str]] = [
    ({"stop": ["x"]}, "'stop' is not supported: leave it out"),
    ({"logprobs": True}, "'logprobs' is not supported"),
    ({"logit_bias": {"5": 1}}, "'logit_bias' is not supported"),
    ({"frequency_penalty": 0.5}, "'frequency_penalty' is not supported"),
    ({"response_format": {"type": "json_object"}}, "'response_format' is not supported"),
    ({"extra_body": {"beam": 2}}, "unknown key of the body 'beam': did you mean 'beams'"),
    ({"extra_body": {"prompt": "w4"}}, "send 'messages' to /v1/chat/completions"),
    ({"extra_body": {"beams": 5}}, "5 beams or samples exceed this server's limit of 4"),
    ({"extra_body": {"stream": 1}}, "stream true or false"),
    ({"n": 5}, "5 beams or samples exceed this server's limit of 4"),
    ({"n": 0}, "n=0: must be a whole number from 1"),
    ({"temperature": -1}, "temperature=-1"),
    ({"temperature": "hot"}, "must be of type float"),
    ({"temperature": 1, "seed": -1}, "seed=-1"),
    ({"seed": -1}, "seed=-1"),
    ({"max_tokens": 21}, "max_tokens=21 exceeds this server's limit of 20"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "send one of them"),
    ({"messages": []}, "messages: must be a list of objects"),
    ({"messages": [{"role": "assistant", "content": "w4"}]}, "the last must be of the user"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type text"),
    ({"messages": [{"role": "user", "content": "w4 " * 20}]}, "21 tokens exceeds the limit of 16"),
]


def test_what_cannot_be_answered_raises_a_bad_request(api: Any) -> None:
    for sent, message in BAD:
        for stream in ({}, {"stream": True}):
            if "stream" not in sent.get("extra_body", {}):
                with pytest.raises(openai.BadRequestError) as caught:
                    chat(api, **sent, **stream)
                assert message in caught.value.message and "\n" not in caught.value.message
                assert caught.value.type == "invalid_request_error"
    for sent, message in (
        ({"prompt": [4, 5]}, "token ids are not supported"),
        ({"prompt": []}, "must be a string or a list"),
        ({"prompt": ["w4"] * 5}, "5 texts exceed this server's limit of 4"),
        ({"prompt": ["w4", "w5"], "stream": True}, "one prompt at a time"),
        ({"prompt": "w4", "logprobs": 0}, "'logprobs' is not supported"),
        ({"prompt": "w4", "echo": True}, "'echo' is not supported"),
        ({"prompt": ["w4", "w4 " * 20]}, "text 2: "),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model="numbers", **sent)
        assert message in caught.value.message


def test_what_is_not_there_raises_not_found(api: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="did you mean 'numbers'") as caught:
        chat(api, model="numbrs")
    assert caught.value.code == "model_not_found"
    for call in (
        lambda: api.responses.create(model="numbers", input="w4"),
        lambda: api.embeddings.create(model="numbers", input="w4"),
    ):
        with pytest.raises(openai.NotFoundError, match=r"docs/serve\.md has the paths"):
            call()


def test_a_text_that_fails_raises_the_error_of_a_server(api: Any) -> None:
    with pytest.raises(openai.InternalServerError, match="NaN or infinite log-probabilities"):
        chat(api, f"w{BROKEN} w5", extra_body={"min_tokens": 3})
    with pytest.raises(openai.APIError, match="NaN or infinite log-probabilities"):
        list(chat(api, f"w{BROKEN} w5", stream=True, extra_body={"min_tokens": 3}))


def test_a_key_is_needed_if_there_is_one(serve: Callable[..., Any]) -> None:
    client = serve("key")
    with (
        connected(client, "other") as api,
        pytest.raises(openai.AuthenticationError, match="a key is needed") as caught,
    ):
        chat(api)
    assert caught.value.code == "invalid_api_key"
    with connected(client, "key") as api:
        assert chat(api).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_raises_a_rate_limit(serve: Callable[..., Any], engine: Watched, stream: bool) -> None:
    client = serve(slots=1, max_queue=0)
    engine.open.clear()
    running = threading.Thread(target=post, args=(client,), kwargs={"text": "w4"})
    running.start()
    wait_for(lambda: counted(client, "running_lines") == 1)
    with connected(client) as api, pytest.raises(openai.RateLimitError, match="try again later") as caught:
        chat(api, stream=stream)
    assert caught.value.response.headers["retry-after"] == "1"
    engine.open.set()
    running.join(20)


def test_a_client_that_closes_its_stream_frees_its_place(
    client: Any, api: Any, engine: Watched, cancelled: Callable[[], bool]
) -> None:
    engine.open.clear()
    stream = chat(api, stream=True, extra_body={"min_tokens": 20})
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    wait_for(lambda: counted(client, "running_lines") == 1)
    stream.close()
    wait_for(cancelled)
    engine.open.set()
    wait_for(lambda: counted(client, "running_lines") == 0)
    assert counted(client, "steps_total") < 5


def test_a_model_that_samples_by_itself_searches_at_temperature_0(serve: Callable[..., Any]) -> None:
    way = {"sampling": True}
    http = serve(named={"numbers": way})

    def text(**options: Any) -> str:
        body = {"prompt": "w7 w8 w9", "max_tokens": 9, **options}
        return str(http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    assert text(temperature=0) == translated("w7 w8 w9", {"max_tokens": 9}).text
    for seed in (1, 2, 3):
        assert text(seed=seed) == translated("w7 w8 w9", {**way, "max_tokens": 9, "seed": seed}).text
