"""KServe v2, driven by Triton's own client: answers are those of `Translator.translate`."""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tformer_deploy import __version__
from tformer_deploy.serve.models import Model
from tformer_deploy.translate.opening import TranslatorOptions, open_translator

from .serving import BROKEN, CAPS, Watched, counted, post, translator_of, wait_for

triton = pytest.importorskip("tritonclient.http")
BUNDLE = Path(__file__).parent / "bundles/v2/copy"
TEXTS = ["w7 w8 w9", "", "w5"]


@pytest.fixture
def kserve(client: Any) -> Iterator[Any]:
    with connected(client) as found:
        yield found


def connected(client: Any) -> Any:
    """Triton's client of the server that httpx's client is of."""
    return triton.InferenceServerClient(f"{client.base_url.host}:{client.base_url.port}")


def bytes_of(name: str, texts: Any, binary: bool = True) -> Any:
    values = np.array(texts, dtype=np.object_)
    tensor = triton.InferInput(name, list(values.shape), "BYTES")
    return tensor.set_data_from_numpy(values, binary_data=binary)


def number_of(name: str, value: Any, datatype: str, kind: Any, binary: bool = True) -> Any:
    return triton.InferInput(name, [1], datatype).set_data_from_numpy(np.array([value], kind), binary_data=binary)


def expected(texts: list[str], prefixes: tuple[str, ...] = (), **options: Any) -> list[Any]:
    with translator_of(Watched()) as translator:
        return translator.translate(texts, prefixes, **options)


def refusal(kserve: Any, *inputs: Any, model: str = "numbers", **more: Any) -> tuple[str, str]:
    with pytest.raises(triton.InferenceServerException) as caught:
        kserve.infer(model, list(inputs) or [bytes_of("text", ["w4"])], **more)
    message = caught.value.message()
    assert "\n" not in message
    return caught.value.status(), message


@pytest.mark.parametrize(("binary_in", "binary_out"), [(True, None), (False, False), (False, True)])
def test_texts_are_translated(kserve: Any, binary_in: bool, binary_out: bool | None) -> None:
    names = ["text", "score", "finished", "tokens"]
    outputs = None if binary_out is None else [triton.InferRequestedOutput(n, binary_data=binary_out) for n in names]
    answer = kserve.infer(
        "numbers", [bytes_of("text", TEXTS, binary_in)], outputs=outputs, request_id="é", parameters={"beams": 3}
    )
    found = expected(TEXTS, beams=3)
    assert [each if isinstance(each, str) else each.decode() for each in answer.as_numpy("text")] == [
        each.text for each in found
    ]
    assert answer.as_numpy("score").tolist() == [each.score for each in found]
    assert answer.as_numpy("finished").tolist() == [each.finished for each in found]
    assert answer.as_numpy("tokens").tolist() == [len(each.ids) for each in found]
    assert answer.get_response()["id"] == "é" and answer.get_response()["model_name"] == "numbers"


def test_the_n_best_are_a_further_axis(kserve: Any) -> None:
    answer = kserve.infer("b", [bytes_of("text", [["w7 w8"], [""]])], parameters={"beams": 3, "n_best": 2})
    [best] = expected(["w7 w8"], beams=3, n_best=2)
    texts, scores, tokens = (answer.as_numpy(name) for name in ("text", "score", "tokens"))
    assert texts.shape == scores.shape == tokens.shape == (2, 1, 2)
    assert [each.decode() for each in texts[0, 0]] == [best.text, best.alternatives[0].text]
    assert scores[0, 0].tolist() == [best.score, best.alternatives[0].score]
    assert texts[1, 0].tolist() == [b"", b""] and tokens[1, 0].tolist() == [0, -1]
    assert scores[1, 0].tolist() == [0.0, -np.finfo(np.float64).max]


def test_prefixes_and_options_are_inputs_too(kserve: Any) -> None:
    inputs = [bytes_of("text", ["w7", "w8"]), bytes_of("prefix", ["w9 w9", ""], binary=False)]
    inputs += [number_of("sampling", True, "BOOL", bool), number_of("seed", 5, "UINT64", np.uint64)]
    inputs += [number_of("top_k", 4, "INT32", np.int32, binary=False), bytes_of("temperature", ["0.7"])]
    inputs += [number_of("repetition_penalty", 1.5, "FP32", np.float32)]
    answer = kserve.infer("numbers", inputs, parameters={"max_tokens": "9"})
    options = {"sampling": True, "seed": 5, "top_k": 4, "temperature": 0.7, "repetition_penalty": 1.5, "max_tokens": 9}
    alone = [expected([text], (begin,), **options)[0] for text, begin in (("w7", "w9 w9"), ("w8", ""))]
    assert [each.decode() for each in answer.as_numpy("text")] == [each.text for each in alone]
    assert answer.as_numpy("score").tolist() == [each.score for each in alone]


def test_only_the_outputs_that_are_asked_for_are_sent(kserve: Any) -> None:
    answer = kserve.infer("numbers", [bytes_of("text", ["w7"])], outputs=[triton.InferRequestedOutput("score")])
    assert [each["name"] for each in answer.get_response()["outputs"]] == ["score"]
    assert answer.as_numpy("score")[0] == expected(["w7"])[0].score and answer.as_numpy("text") is None


def test_a_request_may_be_plain_json(client: Any) -> None:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [2, 1], "data": [["w7"], ["w8"]]}
    answer = client.post("/v2/models/numbers/infer", json={"inputs": [tensor]}).json()
    assert answer["outputs"][0] == {
        "name": "text",
        "datatype": "BYTES",
        "shape": [2, 1],
        "data": [expected([text])[0].text for text in ("w7", "w8")],
    }
    assert "id" not in answer


def test_the_server_and_its_models_are_described(kserve: Any) -> None:
    assert kserve.is_server_live() and kserve.is_server_ready()
    assert kserve.is_model_ready("b") and not kserve.is_model_ready("c")
    assert kserve.get_server_metadata()["version"] == __version__
    described = kserve.get_model_metadata("b")
    assert (described["name"], described["inputs"]) == ("b", [{"name": "text", "datatype": "BYTES", "shape": [-1]}])
    assert [each["name"] for each in described["outputs"]] == ["text", "score", "finished", "tokens"]
    assert [each["name"] for each in kserve.get_model_repository_index()] == ["numbers", "b"]


def test_the_version_is_the_hash_of_the_bundle(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    version = hashlib.sha256((BUNDLE / "manifest.json").read_bytes()).hexdigest()
    with open_translator(TranslatorOptions(BUNDLE)) as translator:
        model = Model("copy", translator, CAPS)
        assert model.version == version
        model.scheduler.close()
    monkeypatch.setattr("tformer_deploy.serve.models.version_of", lambda _: version)
    with connected(serve()) as kserve:
        assert kserve.get_model_metadata("b", version)["versions"] == [version]
        assert kserve.is_model_ready("b", version) and not kserve.is_model_ready("b", "1")
        answer = kserve.infer("b", [bytes_of("text", ["w4"])], model_version=version)
        assert answer.get_response()["model_version"] == version
        status, message = refusal(kserve, model_version="1")
        assert (
            status == "404" and message == f"model 'numbers' has no version '1': it has '{version}'; or name no version"
        )


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "numbrs"}, "404", "did you mean 'numbers'"),
    ({"model_version": "1"}, "404", "model 'numbers' has no version '1'"),
    ({"parameters": {"beam": 2}}, "400", "unknown parameter 'beam': did you mean 'beams'"),
    ({"parameters": {"beams": 5}}, "422", "5 beams or samples exceed this server's limit of 4"),
    ({"parameters": {"beams": "many"}}, "400", "must be a whole number"),
    ({"parameters": {"beams": 1.5}}, "400", "must be of type int"),
    ({"timeout": 1000}, "400", "parameter 'timeout' is not supported"),
    ({"priority": 1}, "400", "parameter 'priority' is not supported"),
    ({"sequence_id": 7}, "400", "requests have no state"),
    ({"request_compression_algorithm": "gzip"}, "400", "Content-Encoding 'gzip' is not supported"),
    ({"outputs": [triton.InferRequestedOutput("txt")]}, "400", "unknown output 'txt': did you mean 'text'"),
    ({"outputs": [triton.InferRequestedOutput("text", class_count=2)]}, "400", "'classification' is not supported"),
]


def test_what_cannot_be_answered_raises_the_clients_error(kserve: Any) -> None:
    for asked, status, message in REFUSALS:
        found = refusal(kserve, **asked)
        assert found[0] == status and message in found[1]


def test_inputs_that_cannot_be_read_raise_the_clients_error(kserve: Any) -> None:
    shared = triton.InferInput("text", [1], "BYTES")
    shared.set_shared_memory("region", 8)
    text = bytes_of("text", ["w4"])
    for inputs, message in (
        ([number_of("text", 4, "INT32", np.int32)], "input 'text': must be of type BYTES, not INT32"),
        ([bytes_of("prefix", ["w4"])], "input 'text': send a BYTES tensor with one text at least"),
        ([text, bytes_of("prefix", ["w4", "w5"])], "1 texts, 2 prefixes"),
        ([text, bytes_of("texts", ["w4"])], "unknown input 'texts': did you mean 'text'"),
        ([text, text], "input 'text' stands twice"),
        ([text, number_of("suppress", 5, "INT32", np.int32)], "suppress=5: must be a list"),
        ([text, bytes_of("beams", ["2", "3"])], "input 'beams': 2 values: give one"),
        ([bytes_of("text", [b"\xff"])], "input 'text': element 0 is not UTF-8"),
        ([bytes_of("text", ["w4"] * 5)], "5 texts exceed this server's limit of 4"),
        ([shared], "'shared_memory_region' is not supported"),
    ):
        found = refusal(kserve, *inputs)
        assert found[0] == "400" and message in found[1]


def test_an_error_names_its_text(kserve: Any) -> None:
    status, message = refusal(kserve, bytes_of("text", ["w4", f"w{BROKEN} w5"]), parameters={"min_tokens": 3})
    assert status == "500" and message.startswith("text 2: ") and "NaN or infinite log-probabilities" in message
    status, message = refusal(kserve, bytes_of("text", ["w4 " * 20]))
    assert status == "422" and "21 tokens exceeds the limit of 16" in message


def infer(client: Any, body: bytes, length: Any) -> Any:
    return client.post("/v2/models/b/infer", content=body, headers={"Inference-Header-Content-Length": str(length)})


def tensor(size: Any, **changed: Any) -> bytes:
    header = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": size}, **changed}
    return json.dumps({"inputs": [header]}).encode()


BODIES = [
    (tensor(6), struct.pack("<I2s", 2, b"w4"), ""),
    (tensor(6), struct.pack("<I1s", 2, b"w"), "binary_data_size=6 is not what follows the JSON"),
    (tensor(5), struct.pack("<I1s", 2, b"w"), "ends within an element"),
    (tensor(2), b"\0\0", "ends within an element"),
    (tensor(0), b"", "0 values do not fill the shape [1]"),
    (tensor(0, shape=[0]), b"x", "1 bytes follow the last binary input"),
    (tensor(-1), b"x", "binary_data_size=-1"),
    (tensor("6"), b"x", "binary_data_size='6'"),
    (tensor(4, datatype="FP64"), b"abcd", "4 bytes are not 1 values of type FP64"),
    (tensor(0, shape=[10**9] * 8, datatype="FP64"), b"", f"0 bytes are not {10**72} values"),
    (tensor(0, shape=[1 << 31]), b"", "whole numbers"),
    (tensor(0, shape=[1] * 9), b"", "at most 8 whole numbers"),
    (tensor(0, shape=[-1]), b"", "whole numbers"),
    (tensor(0, datatype="STRING"), b"", "unknown datatype of input 'text' 'STRING'"),
    (tensor(None), b"", "input 'text' has no data"),
    (tensor(None, data=["w4", ["w5"]]), b"", "must be a list of values of type BYTES"),
    (tensor(None, data=[True], datatype="INT32"), b"", "must be a list of values of type INT32"),
    (tensor(None, name=3), b"", "inputs: must be a list of objects with a name"),
    (tensor(None, parameters=[]), b"", "parameters: must be an object"),
    (b'{"inputs": 3}', b"", "inputs: must be a list"),
    (b'{"input": []}', b"", "did you mean 'inputs'"),
    (b"[]", b"", "must be a JSON object"),
    (b"", struct.pack("<I2s", 2, b"w4"), "is not JSON"),
]


def test_bodies_that_are_no_requests_are_refused(client: Any) -> None:
    for header, binary, message in BODIES:
        answer = infer(client, header + binary, len(header))
        assert answer.status_code == (400 if message else 200), header
        assert message in answer.json().get("error", ""), header


def test_a_length_that_is_none_is_refused(client: Any) -> None:
    for length in ("-1", "9" * 30, "x", "²"):
        headers = {"Inference-Header-Content-Length": length.encode()}
        answer = client.post("/v2/models/b/infer", content=b"{}", headers=headers)
        assert answer.status_code == 400 and "is not the length of the JSON" in answer.json()["error"]


def test_extensions_that_are_not_there_are_refused_by_name(kserve: Any) -> None:
    for call in (
        kserve.get_system_shared_memory_status,
        kserve.get_cuda_shared_memory_status,
        kserve.get_trace_settings,
        kserve.get_log_settings,
        lambda: kserve.get_model_config("b"),
        lambda: kserve.get_inference_statistics("b"),
        lambda: kserve.load_model("b"),
        kserve.get_inference_statistics,
        lambda: kserve.unload_model("b"),
    ):
        with pytest.raises(
            triton.InferenceServerException, match="an extension that this server does not have"
        ) as caught:
            call()
        assert caught.value.status() == "404"


def test_a_key_is_needed_but_for_health(serve: Callable[..., Any]) -> None:
    with connected(serve("key")) as kserve:
        assert kserve.is_server_live() and kserve.is_server_ready()
        status, message = refusal(kserve)
        assert status == "401" and "a key is needed" in message
        assert kserve.infer("b", [bytes_of("text", ["w4"])], headers={"Authorization": "Bearer key"})


def test_a_full_queue_raises_the_clients_error(serve: Callable[..., Any], engine: Watched) -> None:
    client = serve(slots=1, max_queue=0)
    engine.open.clear()
    running = threading.Thread(target=post, args=(client,), kwargs={"text": "w4"})
    running.start()
    wait_for(lambda: counted(client, "running_lines") == 1)
    with connected(client) as kserve:
        status, message = refusal(kserve)
    assert status == "429" and "try again later" in message
    engine.open.set()
    running.join(20)
