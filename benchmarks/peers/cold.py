"""Cold start: a whole process, from its start to one translated sentence, and its peak memory."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tformer_deploy.base.errors import EngineError
from tformer_deploy.base.processes import in_turn
from tformer_deploy.engines.ort import shared_library

from ..whole import run_whole
from . import ROOT
from .measure import Model, speed_ratios

REFERENCE = "CTranslate2 int8, script"


@dataclass(frozen=True)
class Command:
    """A process that translates one sentence."""

    name: str
    words: list[str]
    stdin: str = ""


def cold_commands(
    model: Model, text: str, ids: Sequence[int], engines: Sequence[str], max_tokens: int, cpp: Path | None = None
) -> list[Command]:
    """The least script for each library, our real command and `cpp`, the C++ runtime's, with one thread as CTranslate2.

    CTranslate2 gets tokens, ours split the text.
    """
    peer, own = str(model.pythons["run_ctranslate2"]), str(model.pythons["run_tformer"])
    limit, package = str(max_tokens), __package__
    converted = str(model.ctranslate2 / "int8")
    script = [peer, "-m", f"{package}.cold_ctranslate2", converted, limit, *map(str, ids)]
    found = [Command(REFERENCE, script)]
    for engine in engines:
        backend, _, variant = engine.partition(":")
        if backend == "native":
            if cpp:
                words = [str(cpp), "translate", str(model.bundle), "--backend", "native", "--variant", variant]
                words += ["--threads", "1", "--json", "--max-tokens", limit]
                found.append(Command(f"{engine}, tformer-cpp", words, text + "\n"))
            continue
        variant = variant or ("fp32" if backend == "ort" else "")
        arguments = [str(model.bundle), backend, variant, limit, text]
        found.append(Command(f"{engine}, script", [own, "-m", f"{package}.cold_tformer", *arguments]))
        if variant:
            words = [own, "-m", "tformer_deploy", "translate", str(model.bundle), "--variant", variant]
            found.append(Command(f"{engine}, command", [*words, "--json", "--max-tokens", limit], text + "\n"))
        if variant and cpp:
            words = [str(cpp), "translate", str(model.bundle), "--variant", variant, "--threads", "1"]
            words += ["--onnxruntime", shared_library()]
            words += ["--json", "--max-tokens", limit]
            found.append(Command(f"{engine}, tformer-cpp", words, text + "\n"))
    return found


def cold_starts(commands: Sequence[Command], tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds and MiB of each command in turns, by its name; `tokens` are those that each must write, 0: any."""
    results: dict[str, Any] = {command.name: {"seconds": [], "peak_mib": []} for command in commands}
    for number in range(rounds + 1):  # the first, untimed, fills the cache of files
        for command in in_turn(commands, number):
            result = results[command.name]
            if "error" in result:
                continue
            try:
                output, seconds, peak_mib = run_whole(command.words, command.stdin, ROOT)
                check(output, tokens)
            except EngineError as error:
                result["error"] = str(error)
                continue
            if number:
                result["seconds"].append(seconds)
                result["peak_mib"].append(peak_mib)
    summarise(results)
    return results


def summarise(results: dict[str, Any]) -> None:
    """Add medians, and the medians of the ratios to CTranslate2's within a round."""
    reference = results[REFERENCE]
    for result in results.values():
        if "error" not in result:
            result |= {
                "seconds_median": statistics.median(result["seconds"]),
                "seconds_min": min(result["seconds"]),
                "peak_mib_median": statistics.median(result["peak_mib"]),
            }
            if "error" not in reference:
                result["speed"] = statistics.median(speed_ratios(result["seconds"], reference["seconds"]))
                result["memory"] = statistics.median(
                    ours / theirs for ours, theirs in zip(result["peak_mib"], reference["peak_mib"], strict=True)
                )


def check(output: str, tokens: int) -> None:
    """Ids, or the JSON of our command, must be as many as expected; 0: any. Raises EngineError."""
    written = len(json.loads(output)["ids"]) if output.startswith("{") else len(output.split())
    if not written or (tokens and written != tokens):
        raise EngineError(f"wrote {written} tokens, not {tokens or 'some'}")
