"""The results as Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

ENVIRONMENT = {
    **dict.fromkeys((("CT2_FORCE_CPU_ISA", name) for name in ("AVX512", "AVX2")), "forced"),
    ("CT2_PACKED_GEMM", "1"): "packed",
    ("CT2_USE_MKL", "0"): "no MKL",
    ("CT2_USE_MKL", "1"): "MKL",
    **dict.fromkeys(
        (("ONEDNN_MAX_CPU_ISA", name) for name in ("AVX512_CORE_BF16", "AVX512_CORE_VNNI", "AVX2")), "without AMX"
    ),
}
"""Words for the variables of settings and their values; forced: to the instruction set of the side, or AVX-512."""
_BRANDS = {"intel", "amd", "nvidia", "processor", "cpu", "r", "tm"}


def machine_name(processor: str, cores: str) -> str:
    """Short, for the name of a file: `Intel(R) Xeon(R) Processor` with 2 cores is `xeon-2core`."""
    return f"{short_name(processor)}-{cores}core"


def short_name(device: str) -> str:
    """A processor or GPU without its brand: `NVIDIA H200` is `h200`."""
    return "-".join(word for word in re.findall("[a-z0-9]+", device.lower()) if word not in _BRANDS)


def markdown(results: Mapping[str, Any]) -> str:
    """All tables."""
    machine = results["machine"]
    packages = {"CTranslate2": results["ctranslate2"]["version"], "OpenVINO": results["ctranslate2"]["openvino"]}
    packages |= {name: machine[name] for name in ("onnxruntime", "torch") if name in machine}
    lines = [
        f"{machine['processor']}, {machine['cores']} cores; "
        + ", ".join(f"{name} {version}" for name, version in packages.items())
        + f"; medians of {results['rounds']} rounds in turns, {results['date']}. In brackets: how many times as fast "
        "as the fastest CTranslate2 / the fastest eager PyTorch with the same limit of instruction sets, by wall time "
        "and by processor time: medians of the ratios within a round. Instruction sets of the machine: "
        + ", ".join(results["instructions"] or ["unknown"])
        + ".",
    ]
    for name, model in results["models"].items():
        equal = model["equal_greedy_float32"]
        lines += [
            "",
            f"**{name}**: {equal['equal']} of {equal['sentences']} greedy outputs equal between CTranslate2 and eager "
            f"PyTorch, both float32, their scores within {equal['score_max']:.0e}.",
            "",
        ]
        if model["points"]:
            lines += table(*_speeds(model["points"]))
        if quality := _quality(model["points"]):
            lines += ["", *table(*quality)]
        lines += ["", f"Process start to one translated sentence, {name}:", "", *table(*_cold(model["cold"]))]
        lines += _failures(model)
    return "\n".join(lines) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [_row(header), "|" + "---|" * len(header), *map(_row, rows)]


def setting_name(result: Mapping[str, Any]) -> str:
    """The chosen setting in few words."""
    setting, batching = result["setting"], result["batching"]
    if "compute_type" in setting:
        words = [setting["compute_type"], f"{setting['intra_threads']}x{setting['inter_threads']}"]
    elif "precision" in setting:
        words = [setting["precision"], f"{setting['threads']}x1"]
    else:
        words = [f"{setting['threads']}x{setting['workers']}", *["compiled"] * bool(setting.get("compiled"))]
    if "batch_type" in batching:
        words.append(f"{batching['max_batch_size']} {batching['batch_type']}")
    elif "max_batch_size" in batching and "precision" in setting:
        words.append(f"{batching['max_batch_size']} examples")
    if "batch_tokens" in batching:
        words.append(f"{batching['batch_tokens']} tokens")
    env = setting.get("env", {})
    words += [word for (name, value), word in ENVIRONMENT.items() if env.get(name) == value]
    return " ".join(words)


def _speeds(points: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Tokens a second by side and point."""
    sides = list(dict.fromkeys(side for point in points.values() for side in point))
    return ["tokens/s", *points], [[side, *(_speed(point.get(side)) for point in points.values())] for side in sides]


def _speed(result: Mapping[str, Any] | None) -> str:
    if result is None or "error" in result:
        return "failed"
    beside = result.get("speed_beside", {})
    pairs = [
        (beside[name]["median"], beside[name]["cpu"]) for name in ("CTranslate2", "eager PyTorch") if name in beside
    ]
    ratios = [f"{wall:.2f}, {cpu:.2f}" for wall, cpu in pairs]
    brackets = f" ({' / '.join(ratios)})" if ratios else ""
    return f"{result['tokens_per_second']:,.0f}{brackets}<br>{setting_name(result)}"


def _quality(points: Mapping[str, Any]) -> tuple[list[str], list[list[str]]] | None:
    """BLEU and equality by side, for corpora."""
    header = ["", *points]
    rows: dict[str, dict[str, str]] = {}
    for point, results in points.items():
        for side, result in results.items():
            if "bleu" in result:
                words = [f"BLEU {result['bleu_lowercased']:.2f} lower-cased, {result['bleu']:.2f} cased"]
                if "equal_to_eager" in result:
                    words.append(f"{result['equal_to_eager']:,} sentences equal to eager")
                words.append(f"{result['sentences_per_second']:,.0f} sentences/s")
                rows.setdefault(side, dict.fromkeys(points, ""))[point] = "; ".join(words)
    return (header, [[side, *cells.values()] for side, cells in rows.items()]) if rows else None


def _cold(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Seconds and memory of whole processes."""
    rows = []
    for name, result in results.items():
        if "error" in result:
            rows.append([name, "failed", "", "", ""])
            continue
        ratios = [f"{result[key]:.2f}" if key in result else "" for key in ("speed", "memory")]
        rows.append(
            [name, f"{result['seconds_median']:.2f} s", ratios[0], f"{result['peak_mib_median']:.0f} MiB", ratios[1]]
        )
    return ["", "seconds", "times as fast as CTranslate2", "peak memory", "of CTranslate2's"], rows


def _failures(model: Mapping[str, Any]) -> list[str]:
    """Failed settings, each message once."""
    found: dict[str, None] = {}
    for trial in model["trials"]:
        if trial["error"]:
            found[f"- {trial['side']}, {setting_name(trial)}: {trial['error']}"] = None
    for point in model["points"].values():
        found |= {f"- {side}: {result['error']}": None for side, result in point.items() if "error" in result}
    found |= {f"- {name}: {result['error']}": None for name, result in model["cold"].items() if "error" in result}
    return ["", "Failed:", "", *found] if found else []


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
