"""Measure tformer, CTranslate2 and eager PyTorch, each with its best settings; writes JSON and Markdown."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tformer_deploy.base.errors import TformerError
from tformer_deploy.base.lines import read_lines
from tformer_deploy.bundle.manifest import Bundle, open_bundle
from tformer_deploy.check.gate import machine

from . import ROOT
from .cold import cold_commands, cold_starts
from .measure import Model, choose, equal_outputs, race, try_all
from .points import NEW_TOKENS, Point, base_points, check_point, corpus_points, random_sources
from .report import machine_name, markdown
from .sides import LIMITS, OURS, Side, ctranslate2_sides, eager_sides, library_sides, openvino_sides, our_sides

ENGINES = ("ort", "ort:int8", "ort:int8-latency", "ort:int4")
EQUAL_SHARE = 0.99
"""Of greedy outputs at float32: with fewer, the models compared are not the same."""
SCORE_TOLERANCE = 0.01
"""Of a whole output's log-probability at float32."""
QUICK_SENTENCES = 100
CPP = ROOT / "engines/build/examples/tformer-cpp"
LIBRARY = "engines/build/libtformer.so"  # from ROOT, where processes are started
HELP_LIMITS = "also native and CTranslate2 with no more than these instruction sets"
BFLOAT16_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def main(arguments: list[str] | None = None) -> None:
    """Compare outputs, find the best settings, measure in turns, write results."""
    options = parse(arguments)
    results = header(options)
    sides = make_sides(options, results)
    with tempfile.TemporaryDirectory() as folder:
        work = [base_work(options.base)] if not options.points or set(options.points) - {"greedy", "beam5"} else []
        if options.multi30k:
            work.append(corpus_work(options.multi30k, options.data, QUICK_SENTENCES if options.quick else None))
        else:
            print("Multi30K is skipped: give --multi30k BUNDLE --data FOLDER")
        for each in work:
            model = make_model(each, options, Path(folder))
            results["models"][model.name] = measure(model, each, sides, options)
    write(results, options.out, "cold" if options.cold else "peers")
    if failed := own_failures(results):
        sys.exit("\n".join(["our own engines failed:", *failed]))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("bundles/base"), help="bundle of the random `base` model")
    parser.add_argument("--multi30k", type=Path, help="bundle of a trained English-German model")
    parser.add_argument("--data", type=Path, help="folder with test_2016_flickr.en.gz and .de.gz")
    parser.add_argument("--peers-python", type=Path, default=Path(".venv-peers/bin/python"))
    parser.add_argument("--engines", nargs="+", default=ENGINES, help="ours, such as ort:int8 or native:native-int8")
    parser.add_argument("--points", nargs="+", default=[], help="such as b8k4, greedy, beam5; default: all")
    parser.add_argument(
        "--peers", nargs="+", default=["CTranslate2", "eager", "OpenVINO"], help="who, by beginnings of names"
    )
    parser.add_argument("--limits", nargs="*", choices=[name for name in LIMITS if name], default=[], help=HELP_LIMITS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpp", type=Path, default=CPP, help="the C++ runtime's command; left out where there is none")
    parser.add_argument("--cold", action="store_true", help="cold starts alone")
    parser.add_argument("--quick", action="store_true", help="few settings, rounds and sentences: does it run at all")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results, with --quick .cache/peers")
    options = parser.parse_args(arguments)
    if bool(options.multi30k) != bool(options.data):
        parser.error("--multi30k and --data go together")
    for name in options.engines:
        if name.partition(":")[0] == "native" and not name.removeprefix("native").removeprefix(":"):
            parser.error(f"--engines {name}: name its variant, as in native:native-int8")
    if options.quick:
        options.rounds = min(options.rounds, 2)
    options.out = options.out or ROOT / (".cache/peers" if options.quick else "benchmarks/results")
    return options


def header(options: argparse.Namespace) -> dict[str, Any]:
    """Machine and versions; what torch needs on this processor."""
    code = (
        "import ctranslate2, importlib.metadata, json; types = ctranslate2.get_supported_compute_types('cpu');"
        "found = {each.metadata['Name']: each.version for each in importlib.metadata.distributions()};"
        "print(json.dumps({'version': ctranslate2.__version__, 'compute_types': sorted(types),"
        "'openvino': found.get('openvino', '')}))"
    )
    peer = subprocess.run([options.peers_python, "-c", code], check=True, capture_output=True, text=True)
    probe = subprocess.run([sys.executable, "-c", BFLOAT16_PROBE], check=False, stderr=subprocess.DEVNULL)
    # Some virtual machines announce AMX and kill who uses it.
    env = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"} if probe.returncode < 0 else {}
    return {
        "date": str(datetime.date.today()),
        "machine": machine(),
        "instructions": instructions(),
        "ctranslate2": json.loads(peer.stdout),
        "torch_environment": env,
        "rounds": options.rounds,
        "models": {},
    }


def instructions() -> list[str]:
    """The sets of this processor that products run on."""
    info = Path("/proc/cpuinfo")
    words = info.read_text().split() if info.is_file() else []
    return [
        name
        for name in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
        if name in words
    ]


def make_sides(options: argparse.Namespace, results: dict[str, Any]) -> list[Side]:
    """All sides; with --quick one setting each."""
    cores = int(results["machine"]["cores"])
    programs = [name.removeprefix("native:") for name in options.engines if name.startswith("native:")]
    sides = [
        *ctranslate2_sides(results["ctranslate2"]["compute_types"], cores, results["instructions"], options.limits),
        *eager_sides(cores, results["torch_environment"], not options.quick),
        *our_sides([name for name in options.engines if not name.startswith("native")], cores),
        *library_sides(programs, cores, LIBRARY, options.limits),
        *openvino_sides(cores),
    ]
    return [dataclasses.replace(side, settings=side.settings[:1]) for side in sides] if options.quick else sides


@dataclasses.dataclass(frozen=True)
class Work:
    """A workload before it is measured."""

    name: str
    bundle: Bundle
    points: list[Point]
    check: Point
    """Its greedy outputs must be equal."""
    text: str
    """The sentence of the cold start."""
    tokens: int
    """Length of its translation; 0: unknown."""
    references: list[str]


def base_work(path: Path) -> Work:
    """Random weights, synthetic batches."""
    bundle = open_bundle(path)
    vocab = bundle.config.tgt_vocab
    ids = random_sources(vocab, [20], 99)[0]
    text = " ".join(f"w{i}" for i in ids[:-1])
    return Work("base", bundle, base_points(vocab), check_point(vocab), text, NEW_TOKENS, [])


def corpus_work(path: Path, data: Path, sentences: int | None) -> Work:
    """A trained model on test_2016_flickr."""
    bundle = open_bundle(path)
    source, target = (read_lines(data / f"test_2016_flickr.{side}.gz")[:sentences] for side in ("en", "de"))
    tokenizers = bundle.tokenizers()
    points = corpus_points([tokenizers.source_ids(line.strip()) for line in source])
    return Work("Multi30K", bundle, points, points[0], source[0], 0, target)


def make_model(work: Work, options: argparse.Namespace, folder: Path) -> Model:
    """Convert the weights for CTranslate2 and write the points."""
    converted = ROOT / ".cache/ctranslate2" / work.name.lower()
    program = f"{__package__}.to_ctranslate2"
    command = [sys.executable, "-m", program, str(work.bundle.checkpoint.resolve()), str(converted)]
    subprocess.run(command, check=True, cwd=ROOT)
    file = folder / f"{work.name}.json"
    points = {point.name: point.to_json() for point in [*work.points, work.check]}
    file.write_text(json.dumps(points))
    wanted = [point for point in work.points if not options.points or point.name in options.points]
    ours = dict.fromkeys(("run_tformer", "run_library"), Path(sys.executable))
    pythons = dict.fromkeys(("run_ctranslate2", "run_openvino"), options.peers_python.absolute()) | ours
    return Model(work.name, work.bundle.directory.resolve(), converted, wanted, file, pythons)


def measure(model: Model, work: Work, sides: Sequence[Side], options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one model."""
    pair = [side for side in sides if side.name.endswith(" float32")]
    equal = equal_outputs(model, work.check, pair)
    print(f"{model.name}, both float32: {equal}", flush=True)
    if equal["equal"] < EQUAL_SHARE * equal["sentences"] or equal["score_max"] > SCORE_TOLERANCE:
        sys.exit("CTranslate2 and eager PyTorch do not run the same model: nothing was measured")
    ids = work.bundle.tokenizers().source_ids(work.text)
    cpp = options.cpp if options.cpp.is_file() else None
    commands = cold_commands(model, work.text, ids, ["eager", *options.engines], work.tokens or 256, cpp)
    cold = cold_starts(commands, work.tokens, options.rounds)
    if options.cold:
        return {"equal_greedy_float32": equal, "cold": cold, "trials": [], "points": {}}
    racing = [side for side in sides if side.ours or side.name.startswith(tuple(options.peers))]
    trials = try_all(model, racing, 1 if options.quick else 4, options.quick)
    points = {}
    for point in model.points:
        results = race(model, point, racing, choose(trials, point.name), options.rounds)
        add_quality(results, work)
        points[point.name] = results
        print(f"  {model.name}: {point.name} measured", flush=True)
    rows = [dataclasses.asdict(trial) for trial in trials]
    return {"equal_greedy_float32": equal, "cold": cold, "trials": rows, "points": points}


def add_quality(results: dict[str, Any], work: Work) -> None:
    """BLEU and equality with eager PyTorch, where there are references; the outputs themselves are not kept."""
    outputs = {name: result.pop("outputs") for name, result in results.items() if "outputs" in result}
    if not work.references:
        return
    import sacrebleu

    eager = outputs.get("eager PyTorch float32")
    text = work.bundle.tokenizers().target_text
    for name, found in outputs.items():
        lines = [text(ids) for ids in found]
        results[name] |= {
            "bleu_lowercased": sacrebleu.corpus_bleu(lines, [work.references], lowercase=True).score,
            "bleu": sacrebleu.corpus_bleu(lines, [work.references]).score,
        }
        if eager is not None:
            results[name]["equal_to_eager"] = sum(one == other for one, other in zip(found, eager, strict=True))


def own_failures(results: dict[str, Any]) -> list[str]:
    """Every message of ours."""
    found = []
    for model in results["models"].values():
        found += [f"{t['side']} {t['point']}: {t['error']}" for t in model["trials"] if t["error"]]
        for results_of in (*model["points"].values(), model["cold"]):
            found += [f"{name}: {result['error']}" for name, result in results_of.items() if "error" in result]
    return [message for message in found if message.startswith(OURS)]


def write(results: dict[str, Any], out: Path, what: str) -> None:
    """JSON with every round, and the tables."""
    computer = results["machine"]
    name = f"{results['date']}-{machine_name(computer['processor'], computer['cores'])}-{what}.json"
    out.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    (out / f"{what}.md").write_text(text)
    print(f"\n{text}\n{out / name}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (TformerError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
