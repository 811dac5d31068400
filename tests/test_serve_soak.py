"""A minute of random requests to a real server: every answer is compared, and its memory does not grow."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.base.errors import EngineError

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("sentencepiece")
soak = pytest.importorskip("benchmarks.serve.soak")

pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")

BUNDLE = Path(__file__).parent / "bundles/v2/copy"
"""On the CPU engine: memory pools of ONNX Runtime grow for many requests, until they have seen the largest batches."""
LINES = "0 1 2\n3 4\n5\n6 7 8 9\n1 2 3 4 5 6\n9 9 8\n"
LEAKY = """
from tformer_deploy.serve import metrics
kept, answered = [], metrics.Counted.answered
def leaking(self, *given):
    kept.append(b"x" * 100_000 + bytes(1))
    answered(self, *given)
metrics.Counted.answered = leaking
from tformer_deploy.cli import main
main()
"""

pytestmark = pytest.mark.long


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "lines").write_text(LINES)

    def run(requests: int, minutes: float) -> dict[str, Any]:
        out = tmp_path / "out.json"
        command = ["soak", BUNDLE, "--backend", "native", "--variant", "native-int8", "--max-tokens", 12]
        command += ["--src", tmp_path / "lines", "--out", out]
        command += ["--requests", requests, "--minutes", minutes]
        monkeypatch.setattr(sys, "argv", [str(each) for each in command])
        try:
            soak.main()
        finally:
            run.report = json.loads(out.read_text())  # type: ignore[attr-defined]
        return run.report  # type: ignore[attr-defined,no-any-return]

    return run


def test_a_minute_of_requests_has_no_wrong_answer_and_leaves_no_memory(run: Any) -> None:
    found = run(4000, 1)
    assert found["requests"] == 4000 and not found["faults"]
    kinds = {each.split()[0] for each in found["ended"]}
    assert kinds == set(soak.KINDS)


def test_a_server_whose_memory_grows_is_noticed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SERVER", ["-c", LEAKY, "serve"])
    with pytest.raises(EngineError, match="memory grew"):
        run(400, 0.2)
    assert run.report["growth_kib_per_request"] > 50


def test_a_wrong_answer_is_noticed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expect = soak.expect

    def other(*given: Any) -> Any:
        found = expect(*given)
        found["5", 1] = found["3 4", 1]
        return found

    monkeypatch.setattr(soak, "expect", other)
    with pytest.raises(EngineError, match=r"[1-9]\d* answers are wrong or lost"):
        run(200, 0.1)


def test_what_is_compared() -> None:
    assert soak.same({"a": [1.0], "more": 1}, {"a": [1.0005]})
    assert not soak.same({"a": [1.0]}, {"a": [1.1]}) and not soak.same({}, {"a": 1})
    assert not soak.same([1, 2], [1]) and not soak.same("a", "b")
    with pytest.raises(ValueError, match="pieces"):
        soak.streamed(b'event: piece\ndata: {"text": "a"}\n\nevent: result\ndata: {"text": "ab"}\n\n')


def test_growth_is_that_of_the_second_half() -> None:
    async def run() -> float:
        watched = soak.Memory(0)
        watched.samples = [(0.0, 0.0), (1.0, 90.0), *((float(at), 100.0 + at) for at in range(2, 6))]
        return float(watched.growth())

    assert asyncio.run(run()) == pytest.approx(2.0)
