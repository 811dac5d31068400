"""The stages in their order: what each runs, and for how many seconds at most."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from steps import STOPPED, Command, Run

PACKAGES = ("tformer-deploy", "onnx", "polygraphy", "cuda-bindings", "sacrebleu")
"""Of every environment."""
ENGINES = {"rtx": ("onnxruntime", "tensorrt_rtx_cu13"), "ort-gpu": ("onnxruntime-gpu",)}
"""Those of one environment; of all others, onnxruntime."""
GPU = 'from tformer_deploy.engines.trt.api import require_gpu; require_gpu("this stage")'
FLAVOR = "from tformer_deploy.engines.trt.api import installed; print(installed()[0])"
LOG_BYTES = 1_000_000
"""Of TensorRT's messages about a probe that failed: all of a small build, and little to bring back."""


class Plans(NamedTuple):
    """A TensorRT in a precision, the Python that has it, a model, and the profiles that a step needs."""

    python: str
    flavor: str
    precision: str
    model: str
    profiles: list[str]

    def step(self, what: str) -> str:
        """The name of a step."""
        return f"{what}-{self.flavor}-{self.model}-{self.precision}"

    def built(self, run: Run) -> bool:
        """Whether all of them are there."""
        version = "for-rtx" if self.flavor == "rtx" else "[0-9]"
        folders = list((run.models / self.model / "trt/plans").glob(f"*-tensorrt-{version}*-{self.precision}"))
        return all(any((one / f"decoder_step-{size}.plan").exists() for one in folders) for size in self.profiles)


def environments(run: Run) -> list[str]:
    """Every engine has an environment of its own, and so meets no other TensorRT or ONNX Runtime of the host."""
    return [name for name in ("rtx", "trt86", "ort-gpu") if (run.work / name).exists()] or ["plain"]


def python_of(run: Run, name: str = "") -> str:
    """The Python of an environment, or of the first whose installation has worked."""
    name = name or next((each for each in environments(run) if run.worked(f"install-{each}")), "not-installed")
    return run.installed or str(run.work / "env" / name / "bin/python")


def flavors(run: Run) -> list[tuple[str, str]]:
    """Python and flavor of each TensorRT."""
    if run.installed:
        code, flavor, reason = run.ask([run.installed, "-c", FLAVOR], run.env)
        if code:
            run.fail(run.stage, f"not run: no TensorRT: {reason}")
        return [] if code else [(run.installed, flavor)]
    both = (("rtx", "rtx"), ("trt86", "tensorrt"))
    return [(python_of(run, name), flavor) for name, flavor in both if run.worked(f"install-{name}")]


def no_gpu(run: Run) -> str:
    """Why TensorRT has no GPU here; empty: it has one."""
    if run.no_gpu is None:
        code, _, reason = run.ask([python_of(run), "-c", GPU], run.env)
        # Where no answer comes in time, steps are tried.
        run.no_gpu = "" if code in (0, STOPPED) else reason.partition(": ")[2] or reason
    return run.no_gpu


def why_not(run: Run, flavor: str) -> str:
    """Why plans of a TensorRT cannot run on this host, if so."""
    probe = f"probe-{flavor}"
    return no_gpu(run) or (f"{probe} failed: {run.last_line(probe)}" if run.code(probe) else "")


def tformer(python: str, *words: str | Path) -> list[str | Path]:
    """A command of the package."""
    return [python, "-m", "tformer_deploy", *words]


def options(file: Path) -> list[str]:
    """Words that the kit's maker has written, one a line."""
    return file.read_text().splitlines()


def check_or_bench(run: Run, what: str, model: str, *backend: str) -> list[str | Path]:
    """The check of a model against eager PyTorch's answers, or what a stage measures of it."""
    bundle = run.models / model
    words: list[str | Path] = [bundle, "--backend", *backend, "--json"]
    if what == "check":
        target = bundle.with_suffix(".tgt")
        words += ["--reference", bundle.with_suffix(".reference"), *(["--tgt", target] if target.exists() else [])]
        return ["check", *words]
    text = ["--src", bundle.with_suffix(".text")] if model == "trained" and what != "steps" else []
    return ["bench", *words, *options(bundle.with_suffix(f".{what}")), *text]


def host(run: Run) -> None:
    """What the host is."""
    words = [run.base, run.core / "host.py", "describe", shutil.which(run.python) or run.python]
    run.step("host", Command(words), env=run.host_env)


def install(run: Run) -> None:
    """Environments, and the random weights. What ONNX Runtime alone needs is installed when it runs."""
    if run.installed:
        run.say(f"install: nothing, {run.installed} has all")
    for name in environments(run):
        if name != "ort-gpu" and not run.installed:
            install_environment(run, name)
    if run.models.exists():
        run.step("weights", Command([python_of(run), run.core / "seeded.py", run.models / "base"]))


def install_environment(run: Run, name: str) -> None:
    """Make an environment from the kit's wheels."""
    env, wheels = run.work / "env" / name, [run.core / "own", run.core / "wheels", run.work / name / "wheels"]
    python = env / "bin/python"
    links = [word for folder in wheels if folder.exists() for word in ("--find-links", folder)]
    pip = next((run.core / "wheels").glob("pip-*.whl"), run.core / "wheels") / "pip"
    packages = [*PACKAGES, *ENGINES.get(name, ["onnxruntime"])]
    commands = [
        Command([run.base, "-m", "venv", "--clear", "--without-pip", env]),
        Command([python, pip, "install", "-q", "--no-compile", "--no-index", *links, *packages], quiet=True),
        Command([python, pip, "list", "--format", "json"]),
    ]
    if name == "trt86":  # which is no wheel
        site = env / f"lib/python{(run.core / 'python').read_text().strip()}/site-packages"
        commands.insert(1, Command(["ln", "-s", run.work / "trt86/tensorrt", site]))
    run.step(f"install-{name}", *commands)


def probe(run: Run) -> None:
    """Whether this host runs plans at all: small ones, before minutes are spent on others."""
    for python, flavor in flavors(run):
        name, log = f"probe-{flavor}", run.results / f"probe-{flavor}.log"
        if reason := no_gpu(run):
            run.skip(name, reason)
        elif not run.over(name):
            log.unlink(missing_ok=True)
            run.step(name, *probe_commands(run, python, flavor))
            left = run.stage_end - run.elapsed()
            if not run.worked(name) and left > 0:
                commands = [each._replace(quiet=True) for each in probe_commands(run, python, flavor, "--debug")]
                run.execute(f"{name}-debug", commands, left, run.env)
                log.write_bytes((run.out / f"{name}-debug.err").read_bytes()[-LOG_BYTES:])


def probe_commands(run: Run, python: str, flavor: str, *debug: str) -> list[Command]:
    """Build plans of a new copy of the small model, and translate a line with them."""
    model = run.work / "probe" / flavor
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(run.core / "probe", model)
    line = model.with_suffix(".text")
    line.write_text(f"{options(run.core / 'probe.text')[0]}\n")
    build = [
        "build",
        model,
        "--precision",
        "fp32",
        *options(run.core / "probe.build"),
        "--trt-flavor",
        flavor,
        "--json",
    ]
    translate = ["translate", model, "--backend", "trt:fp32", "--max-tokens", "4"]
    return [
        Command([python, run.core / "seeded.py", model], quiet=True),
        Command(tformer(python, *debug, *build)),
        Command(tformer(python, *debug, *translate), quiet=True, stdin=line),
    ]


def precisions() -> list[str]:
    """What plans are built in."""
    return (os.environ.get("KIT_PRECISIONS") or "fp16 fp32").split()


def on_plans(run: Run, *what: tuple[str, str]) -> None:
    """Kinds of steps, each of a model, with every TensorRT and precision."""
    for python, flavor in flavors(run):
        for precision in precisions():
            for kind, model in what:
                profiles = [word for word in options(run.models / f"{model}.build") if not word.startswith("--")]
                plans = Plans(python, flavor, precision, model, profiles[: 1 if kind == "steps" else None])
                if kind == "cpp":
                    in_cpp(run, plans)
                else:
                    with_plans(run, plans, kind, tformer(python, *check_or_bench(run, kind, model, f"trt:{precision}")))


def in_cpp(run: Run, plans: Plans) -> None:
    """The tokens of the C++ runtime, compared with the package's, where the kit has it."""
    builds = sorted(path.name for path in run.core.glob("cpp/*"))
    if not builds:
        return
    brought = "8" if (run.work / "trt86").exists() else builds[-1]
    major, bundle = "11" if plans.flavor == "rtx" else brought, run.models / plans.model
    if major not in builds:
        headers = f"the C++ runtime was built with the headers of TensorRT {' and '.join(builds)}"
        run.skip(plans.step("cpp"), f"{headers}, and this one has those of {major}")
    else:
        words = [plans.python, run.core / "in_cpp.py", "--cpp", run.core / "cpp" / major, "--bundle", bundle]
        words += ["--text", bundle.with_suffix(".text"), "--precision", plans.precision, "--flavor", plans.flavor]
        with_plans(run, plans, "cpp", [*words, *options(bundle.with_suffix(".build"))])


def where(run: Run) -> None:
    """Which tensors differ, of plans of the trained model that were not found right."""
    bundle = run.models / "trained"
    for python, flavor in flavors(run):
        for precision in precisions():
            plans = Plans(python, flavor, precision, "trained", [])
            profiles = [word for word in options(bundle.with_suffix(".build")) if not word.startswith("--")]
            largest = max(int(word.split("x")[0]) for word in profiles)
            widest = [word for word in profiles if int(word.split("x")[0]) == largest]
            name, words = plans.step("where"), [python, run.core / "where.py", bundle, flavor, precision, *widest]
            if reason := why_not(run, flavor):
                run.skip(name, reason)
            elif not run.worked(plans.step("check")):
                run.step(name, Command(words))


def with_plans(run: Run, plans: Plans, what: str, words: list[str | Path]) -> None:
    """A step that runs plans, which are built if need be."""
    name = plans.step(what)
    if not run.worked(name):
        build(run, plans)
    reason = why_not(run, plans.flavor)
    if not reason and not plans.built(run):
        reason = f"there are no plans: {plans.step('build')} has not worked"
    if reason:
        run.skip(name, reason)
    else:
        run.step(name, Command(words))


def build(run: Run, plans: Plans) -> None:
    """Build plans, unless they are there; tried once in a run."""
    name = plans.step("build")
    if (name, *plans.profiles) in run.tried or plans.built(run):
        return
    run.tried.add((name, *plans.profiles))
    run.forget(name)  # it may be of fewer profiles
    bundle = run.models / plans.model
    words: list[str | Path] = ["build", bundle, "--precision", plans.precision, "--trt-flavor", plans.flavor, "--json"]
    words += [word for size in plans.profiles for word in ("--profile", size)]
    if plans.precision != "fp32":
        words += ["--calibrate", bundle.with_suffix(".text")]
    if plans.flavor == "tensorrt":  # so that another try goes on
        words += ["--timing-cache", run.work / "timing.cache"]
    if not no_gpu(run) and (reason := why_not(run, plans.flavor)):  # TensorRT for RTX builds without a GPU
        run.skip(name, reason)
    else:
        run.step(name, Command(tformer(plans.python, *words)))


def ort_cuda(run: Run) -> None:
    """ONNX Runtime's CUDA provider on the graphs for TensorRT; its CUDA libraries are those of the host's torch."""
    reason = no_gpu(run)
    if not run.installed and not (run.work / "ort-gpu").exists():
        reason = run.missing["ort-gpu"]
    elif not run.installed:
        install_environment(run, "ort-gpu")
        if not run.worked("install-ort-gpu"):
            reason = "onnxruntime-gpu is not installed: install-ort-gpu has not worked"
    libraries = run.ask([run.python, run.core / "host.py", "libraries"], run.host_env)[
        1
    ]  # without torch there are none
    paths = ":".join(filter(None, (libraries, os.environ.get("LD_LIBRARY_PATH"))))
    for what in ("check", "steps", "batches", "beams"):
        for model in ("trained", "base"):
            words = check_or_bench(run, what, model, "ort", "--variant", "trt", "--device", "cuda")
            if reason:
                run.skip(f"{what}-ort-cuda-{model}", reason)
            else:
                command = Command(tformer(python_of(run, "ort-gpu"), *words))
                run.step(f"{what}-ort-cuda-{model}", command, env={**run.env, "LD_LIBRARY_PATH": paths})


def eager(run: Run) -> None:
    """Eager PyTorch, with the host's own torch."""
    if not shutil.which(run.python):
        run.skip("eager", f"there is no {run.python} here: name one with torch in KIT_PYTHON")
        return
    code, _, reason = run.ask([run.python, run.core / "eager.py", "--why-not"], run.host_env)
    if code:
        run.skip("eager", reason)
        return
    paths = [*map(str, (run.core / "own").glob("*.whl")), run.host_env.get("PYTHONPATH", "")]
    env = {**run.host_env, "PYTHONPATH": ":".join(filter(None, paths))}
    run.step("eager", Command([run.python, run.core / "eager.py", run.models / "base.points"]), env=env)


STAGES: dict[str, tuple[int, Callable[[Run], None]]] = {
    "host": (30, host),
    "install": (60, install),
    "probe": (90, probe),
    "trained": (270, lambda run: on_plans(run, ("check", "trained"), ("cpp", "trained"))),
    "where": (90, where),
    "steps": (150, lambda run: on_plans(run, ("steps", "base"), ("steps", "trained"))),
    "ort-cuda": (210, ort_cuda),
    "eager": (90, eager),
    "base": (240, lambda run: on_plans(run, ("check", "base"), ("cpp", "base"))),
    "batches": (120, lambda run: on_plans(run, ("batches", "base"), ("batches", "trained"))),
    "beams": (150, lambda run: on_plans(run, ("beams", "base"), ("beams", "trained"))),
}
"""Seconds and steps: 25 minutes in all."""
