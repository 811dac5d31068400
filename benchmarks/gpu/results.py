"""A results folder of the GPU kit to JSON in benchmarks/results and the README's table, without what is not proven."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.report import short_name, table
from tformer_deploy.base.errors import ArtifactError, TformerError
from tformer_deploy.base.files import atomic_file

from .targets import EAGER, PointKey, Side, Target, fastest, judge

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- GPU: made by `make gpu-results` -->", "<!-- GPU: end -->"
PRECISIONS = ("fp16", "fp32")
FLAVORS = {"rtx": "TensorRT for RTX", "tensorrt": "TensorRT"}
ORT_ENGINE = "ort:trt@cuda"
NOT_MEASURED, FAILED = "not measured", "FAILED"
MEASURED = ("steps", "batches", "beams")
"""Stages."""
MODES = ("greedy", "beam", "sampling")
COMPARED = [(model, mode) for model in ("base", "trained") for mode in MODES]
Steps = Mapping[str, dict[str, Any]]


def load(folders: Sequence[Path]) -> dict[str, Any]:
    """What run.sh brought back, on one host or several: of each step what worked or ran last. Raises ArtifactError."""
    loaded = [(folder, load_one(folder)) for folder in folders]
    # A call that only unpacked ran no stage, so that it does not know its host.
    ran = [(folder, found) for folder, found in loaded if found["host"] or found["steps"]] or loaded
    for folder, found in ran:
        if not found["host"].get("gpus"):
            raise ArtifactError(f"{folder} is of a host where nvidia-smi showed no GPU: run the kit on one with a GPU")
    (first, results), *others = ran
    for folder, other in others:
        if other["kit"] != results["kit"]:
            raise ArtifactError(f"{folder} is of another kit than {first}: give results of one kit")
        names = [found["host"]["gpus"][0]["name"] for found in (results, other)]
        if names[0] != names[1]:
            raise ArtifactError(f"{folder} is of {names[1]}, {first} of {names[0]}: give results of one kind")
        for name, step in other["steps"].items():
            before = results["steps"].get(name, {})
            if step.get("code") == 0 or (before.get("code") != 0 and ("code" in step or "code" not in before)):
                results["steps"][name] = step
    return results


def load_one(folder: Path) -> dict[str, Any]:
    """One folder. Raises ArtifactError."""
    path = folder / "results.json"
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = results["format"] == "tformer-gpu-results" and results["version"] == 3
        _ = results["kit"]["checked"], results["steps"], results["host"]
    except FileNotFoundError:
        raise ArtifactError(
            f"{folder} has no results.json: it is what the kit's run.sh writes: copy it again"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): copy it again") from None
    if not known:
        raise ArtifactError(f"{path} is of another format: take the kit and this script from one commit")
    return results


def problem(steps: Steps, name: str) -> str:
    """Why a step's report cannot be used; empty: it can."""
    step = steps.get(name)
    if step is None:
        return f"{name} did not run"
    if "skipped" in step:
        return f"{name} did not run: {step['skipped']}"
    if step["code"] and not (step["code"] == 3 and "report" in step):
        lines = step.get("error", "").splitlines() or [f"exit code {step['code']}"]
        return f"{name} failed: {lines[-1]}"
    return "" if "report" in step else f"{name} wrote no report"


def check_problem(steps: Steps, name: str, engine: str, sentences: int) -> str:
    """Why a check does not prove an engine; empty: it passed, for that engine, on all sentences."""
    if found := problem(steps, name):
        return found
    report = steps[name]["report"]
    engines = {each["engine"]: each for each in report["engines"]}
    if engine not in engines:
        return f"{name} is of {', '.join(engines) or 'no engine'}, not of {engine}"
    if not report["passed"] or steps[name]["code"]:
        failures = [failure for each in report["engines"] for failure in each["failures"]]
        return f"{name} {FAILED}: {failures[0] if failures else 'see results.json'}"
    if report["sentences"] != sentences or {found["mode"] for found in engines[engine]["outputs"]} != set(MODES):
        return f"{name} is of {report['sentences']} sentences, not of {sentences} in every mode"
    wanted = engine.partition(":")[2]
    if wanted in PRECISIONS and engines[engine]["precision"] != wanted:
        return f"{name} ran {engines[engine]['precision']}, not {wanted}"
    return ""


def sides(results: Mapping[str, Any]) -> list[Side]:
    """Eager PyTorch, then every engine that the kit had something to run it with."""
    steps, kit = results["steps"], results["kit"]
    found = eager_sides(steps)
    stages = {"rtx": "rtx", "trt86": "tensorrt"}
    for stage in kit["stages"]:
        if stage == "ort-gpu":
            found.append(fill(Side("`ort`, CUDA, fp32", ORT_ENGINE), results, "{}-ort-cuda-{}"))
        elif flavor := stages.get(stage):
            for precision in PRECISIONS:
                side = Side(f"`trt`, {title(steps, flavor, precision)}, {precision}", f"trt:{precision}")
                found.append(fill(side, results, f"{{}}-{flavor}-{{}}-{precision}"))
    return found


def title(steps: Steps, flavor: str, precision: str) -> str:
    """The library and its version, from the stamp of the plans."""
    report = steps.get(f"build-{flavor}-trained-{precision}", {}).get("report")
    return report["stamp"].split(", ")[1] if report else FLAVORS[flavor]


def eager_sides(steps: Steps) -> list[Side]:
    """PyTorch, the yardstick: it needs no check."""
    refused = problem(steps, "eager")
    found = {kind: Side(f"eager PyTorch, cached steps, {kind}", f"{EAGER}:{kind}", refused) for kind in PRECISIONS}
    for point in () if refused else steps["eager"]["report"]["points"]:
        kind = {"float16": "fp16", "float32": "fp32"}[point["dtype"]]
        found[kind].speeds[point["point"]["batch"], point["point"]["beams"]] = point["tokens_per_s"]
    return [found["fp32"], found["fp16"]]


def fill(side: Side, results: Mapping[str, Any], step: str) -> Side:
    """What passed its check; figures, if both models did. `step` is named by what it does and the model."""
    steps, models = results["steps"], results["kit"]["checked"]
    for model, sentences in models.items():
        name = step.format("check", model)
        found = check_problem(steps, name, side.engine, sentences)
        side.refused, side.failed = side.refused or found, side.failed or found.startswith(f"{name} {FAILED}")
        if not found:
            fill_checked(side, steps[name]["report"], model)
    for model in () if side.refused else models:
        for stage in MEASURED:
            name = step.format(stage, model)
            if found := problem(steps, name):
                side.remarks.append(found)
            else:
                fill_measured(side, steps[name]["report"], model, name)
        if results["kit"].get("cpp") and side.engine.startswith("trt"):
            side.remarks += filter(None, [cpp_problem(steps, step.format("cpp", model), models[model])])
    return side


def fill_checked(side: Side, report: Mapping[str, Any], model: str) -> None:
    """What a check that passed has found."""
    (checked,) = (each for each in report["engines"] if each["engine"] == side.engine)
    for outputs in checked["outputs"]:
        ties = f", {outputs['ties']} ties" if outputs["ties"] else ""
        side.equal[model, outputs["mode"]] = f"{outputs['equal']:,} of {outputs['sentences']:,}{ties}"
    for mode in MODES[:2]:
        if quality := checked["quality"].get(mode):
            engine, eager = (quality[who]["BLEU lower-cased"] for who in ("engine", "eager"))
            side.bleu[mode] = engine, eager


def fill_measured(side: Side, report: Mapping[str, Any], model: str, name: str) -> None:
    """What a benchmark has found."""
    for point in report["points"] if model == "base" else []:
        if point["engine"] == side.engine:
            key = point["point"]["batch"], point["point"]["beams"]
            side.speeds[key], side.steps[key] = point["tokens_per_s"], point["step_ms"]["median"]
            if point["device_ms"] is not None:
                side.host[key] = max(0.0, 1 - point["device_ms"] / point["latency_ms"]["p50"])
    for text in report["corpus"]:
        if text["engine"] == side.engine:
            side.text[text["beams"]] = text["tokens_per_s"]
    devices = [each["device"] or {} for each in report["engines"] if each["engine"] == side.engine]
    for reason in filter(None, (device.get("not_captured") for device in devices)):
        side.remarks.append(f"{name}: steps were not replayed as CUDA graphs: {reason}")


def cpp_problem(steps: Steps, name: str, sentences: int) -> str:
    """Why the C++ runtime is not proven on these plans; empty: it gave the Python package's tokens on all sentences."""
    if found := problem(steps, name):
        return found
    searches = steps[name]["report"]["searches"]
    compared = [each["sentences"] for each in searches]
    if not compared or set(compared) != {sentences}:
        return f"{name}: C++ was compared on {', '.join(map(str, compared)) or 'no'} sentences, not on {sentences}"
    differ = [each for each in searches if each["equal"] != each["sentences"]]
    return "".join(
        f"{name}: C++ gives other tokens with {each['beams']} beams: {each['equal']} of {each['sentences']} are equal"
        for each in differ[:1]
    )


def markdown(results: Mapping[str, Any], found: Iterable[Side]) -> str:
    """Both tables, what was refused, and what they were measured on."""
    host, kit, rows = results["host"], results["kit"], list(found)
    gpu = host["gpus"][0]
    keys = sorted({key for side in rows for key in side.speeds}, key=lambda key: (key[1], key[0]))
    best, targets = fastest(rows), judge(rows, kit["checked"]["trained"])
    random = kit["random"]
    about = (
        f"{gpu['name']}, driver {gpu['driver_version']}, {host['cores']} cores of {host['processor']}, "
        f"torch {host['torch']}; {host['date']}, commit {kit['commit']}."
    )
    refused = dict.fromkeys(f"- {side.name}: {side.refused}" for side in rows if side.refused)
    if not keys:
        passed = [
            f"- {side.name}, {model}, {mode}: {proven_words(side, model, mode)}"
            for side in rows
            for model, mode in side.equal
        ]
        tried = [line for line in refused if not line.endswith("did not run")]
        return "\n".join(
            [f"{about} Speeds need the checks of both models. What passed, and what did not:", "", *passed, *tried]
        )
    lines = [
        f"{about} The `{random['preset']}` preset with random weights, vocabulary "
        f"{random['vocabulary']:,}, {random['lengths'][0]} source tokens, {random['lengths'][1]} generated; target "
        "tokens a second, in brackets how many times as fast as eager PyTorch's faster precision, which is timed by "
        "the GPU's clock without a search on the host, the others by the wall's with it. Only engines whose checks of "
        "both models passed have figures.",
        "",
        *table(["", *map(point_name, keys)], [[side.name, *(speed(side, key, best) for key in keys)] for side in rows]),
        "",
        "What is wanted, and what was measured:",
        "",
        *table(["", "wanted", "engine", "measured", ""], [target_row(each) for each in targets]),
        "",
        "Milliseconds a step as the host sees it, in brackets the share of a batch's time in which the GPU is idle:",
        "",
        *table(
            ["", *map(point_name, keys)],
            [[side.name, *(step_time(side, key) for key in keys)] for side in rows if not side.eager],
        ),
        "",
        f"Sentences equal to eager PyTorch token by token, of the random model and of the trained one, which gets "
        f"{kit['text']}, and target tokens a second of that whole text:",
        "",
        *table(
            ["", *(f"{model}, {mode}" for model, mode in COMPARED)]
            + ["BLEU (eager)"]
            + [f"tokens/s, {point_name((0, beams))}" for beams in text_beams(rows)],
            checked_rows(rows),
        ),
    ]
    remarks = [f"- {side.name}: {remark}" for side in rows for remark in side.remarks]
    lines += ["", "Refused:", "", *refused] if refused else []
    return "\n".join([*lines, *(["", "Remarks:", "", *remarks] if remarks else [])])


def proven_words(side: Side, model: str, mode: str) -> str:
    """What a check found, and BLEU, eager PyTorch's in brackets."""
    quality = side.bleu.get(mode) if model == "trained" else None
    bleu = f"; BLEU {quality[0]:.2f} ({quality[1]:.2f})" if quality else ""
    return f"equal to eager PyTorch {side.equal[model, mode]}{bleu}"


def checked_rows(rows: Iterable[Side]) -> list[list[str]]:
    """Cells of the second table."""
    kept = [side for side in rows if not side.eager]
    return [
        [side.name, *(side.equal.get(compared, "refused") for compared in COMPARED)]
        + [both_bleus(side)]
        + [f"{side.text[beams]:,.0f}" if beams in side.text else NOT_MEASURED for beams in text_beams(kept)]
        for side in kept
    ]


def text_beams(rows: Iterable[Side]) -> list[int]:
    """Widths with which somebody translated the text."""
    return sorted({beams for side in rows for beams in side.text})


def point_name(key: PointKey) -> str:
    """The head of a column."""
    batch = f"batch {key[0]}, " if key[0] else ""
    return f"{batch}{'greedy' if key[1] == 1 else f'beam {key[1]}'}"


def speed(side: Side, key: PointKey, best: Mapping[PointKey, float]) -> str:
    """A cell of the first table."""
    if key not in side.speeds:
        return "refused" if side.refused else NOT_MEASURED
    ratio = f" ({side.speeds[key] / best[key]:.2f})" if best.get(key) and not side.eager else ""
    return f"{side.speeds[key]:,.0f}{ratio}"


def step_time(side: Side, key: PointKey) -> str:
    """A cell of the table of steps."""
    if key not in side.steps:
        return "refused" if side.refused else NOT_MEASURED
    return f"{side.steps[key]:.3f}" + (f" ({side.host[key]:.0%})" if key in side.host else "")


def both_bleus(side: Side) -> str:
    """Greedy and of a beam; of eager PyTorch in brackets."""
    engine, eager = (" / ".join(f"{both[i]:.2f}" for both in side.bleu.values()) for i in range(2))
    return f"{engine} ({eager})" if side.bleu else NOT_MEASURED


def target_row(target: Target) -> list[str]:
    """Cells of the table of targets."""
    return [target.what, target.wanted, target.side, target.measured, target.verdict]


def put_table(page: Path, text: str) -> None:
    """Replace what stands between the markers of a page. Raises ArtifactError."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ArtifactError(f"{page} has no place for the table: add the lines {BEGIN} and {END}")
    with atomic_file(page) as temporary:
        temporary.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Write both; 3 where something was refused or is missing."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.results", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="what run.sh wrote, on one host after the other")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--page", type=Path, default=ROOT / "README.md")
    options = parser.parse_args(arguments)
    results = load(options.folders)
    found = sides(results)
    name = f"{results['host']['date']}-{short_name(results['host']['gpus'][0]['name'])}.json"
    put_table(options.page, markdown(results, found))
    with atomic_file(options.out / name) as temporary:
        temporary.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{options.out / name} and the table of {options.page} written")
    for target in judge(found, results["kit"]["checked"]["trained"]):
        print(" | ".join(filter(None, target_row(target))))
    for side in found:
        for remark in [f"refused: {side.refused}"] if side.refused else side.remarks:
            print(f"{side.name}: {remark}", file=sys.stderr)
    return 3 if any(side.refused or side.remarks for side in found) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (TformerError, OSError) as error:
        sys.exit(f"error: {error}")
