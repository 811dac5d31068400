"""Make the GPU kit: a folder of pieces, and run.sh that puts them together on the host. See docs/gpu.md."""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tformer_deploy import __version__
from tformer_deploy.base.errors import ArtifactError, TformerError
from tformer_deploy.base.files import atomic_directory, write_json

from .bundles import BASE_LENGTHS, add_probe, add_random, add_trained
from .pieces import SUMS, pack, write_sums
from .trt86 import PYTHON as TRT86_PYTHON
from .trt86 import add_python, add_tensorrt
from .wheels import CORE, ORT_GPU, ROOT, RTX, RTX_BINDINGS, RTX_PACKAGE, build_own, build_source, download, unsqueeze

HERE = Path(__file__).parent
STAGES = ("rtx", "ort-gpu", "trt86")
HOST_FILES = ("eager.py", "host.py", "in_cpp.py", "seeded.py", "where.py")
KIT_FILES = ("run.sh", "runner/run.py", SUMS)
PIECE = r"[\w-]+\.tar(\.xz)?\.\d+"
MIB = 1 << 20
UNCOMPRESSED = ("python", "ort-gpu")
"""What unpacks the others on some hosts, and kernels for GPUs, which are compressed already."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="trained bundle, exported with --recipe trt too")
    parser.add_argument("--text", type=Path, required=True, help="its sentences, one a line")
    parser.add_argument("--tgt", type=Path, help="their translations, for BLEU")
    parser.add_argument("--sentences", type=int, default=1000, help="so many of them are checked")
    parser.add_argument("--checkpoint", type=Path, help="its run folder, if not where it was at export")
    parser.add_argument("--preset", default="base", help="of the model with random weights that speed is measured on")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--seed", type=int, default=1, help="of those weights")
    parser.add_argument("--with", nargs="*", dest="stages", choices=STAGES, default=["rtx", "ort-gpu"],
                        help="what runs the plans: TensorRT for RTX, ONNX Runtime for CUDA, TensorRT 8.6")  # fmt: skip
    parser.add_argument("--python", default="", help="of the host; default 3.12, with trt86 3.11 (which is brought)")
    parser.add_argument("--cpp", type=Path, nargs="*", default=[],
                        help="builds of the C++ runtime with TensorRT_ROOT, one for each major version")  # fmt: skip
    parser.add_argument("--no-wheels", action="store_true", help="the host has all packages already")
    parser.add_argument("--piece-mib", type=float, default=55, help="largest piece")
    parser.add_argument("--out", type=Path, default=Path("gpu-kit"))
    options = parser.parse_args(arguments)
    if "trt86" in options.stages and options.python not in ("", TRT86_PYTHON):
        parser.error(f"trt86 has bindings for Python {TRT86_PYTHON} alone: leave out --python")
    options.python = options.python or (TRT86_PYTHON if "trt86" in options.stages else "3.12")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Make a kit; an older one at the same place is replaced at the end."""
    options = parse(arguments)
    require_replaceable(options.out)
    with atomic_directory(options.out, force=True, kind="GPU kit") as out:
        fill_kit(out, options)
    print(f"{options.out}: copy it to the host and run ./run.sh there")


def require_replaceable(out: Path) -> None:
    """Raise ArtifactError for a folder that is neither empty nor a kit, or that holds more, such as results."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if names and not all((out / name).is_file() for name in KIT_FILES):
        raise ArtifactError(f"{out} is no kit: choose another folder with --out")
    others = sorted(name for name in names - {"run.sh", "runner", SUMS} if not re.fullmatch(PIECE, name))
    if others:
        raise ArtifactError(f"{out} holds {others[0]}, which is not part of a kit: move it, or choose another --out")


def fill_kit(out: Path, options: argparse.Namespace) -> None:
    """Write a kit into an empty folder."""
    pieces, limit = [], int(options.piece_mib * MIB)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".gpu-kit.") as folder:
        core, models = Path(folder) / "core", Path(folder) / "models"
        fill_core(core, options, fill_models(models, options))
        stages = add_stages(Path(folder), options)
        stages.insert(stages[:1] == [Path(folder) / "python"], core)  # which unpacks the others where nothing else can
        stages.append(models)
        with ThreadPoolExecutor() as pool:
            packed = pool.map(lambda stage: pack(stage, out, limit, stage.name not in UNCOMPRESSED), stages)
            for stage, made in zip(stages, packed, strict=True):
                size = sum(path.stat().st_size for path in made)
                print(f"{stage.name}: {size / MIB:.1f} MiB in {len(made)} pieces", flush=True)
                pieces += made
    shutil.copy(HERE / "run.sh", out / "run.sh")
    shutil.copytree(HERE / "runner", out / "runner", ignore=shutil.ignore_patterns("__pycache__"))
    write_sums(out, pieces)


def fill_core(core: Path, options: argparse.Namespace, checked: dict[str, int]) -> None:
    """What every host needs: our wheel and what it imports, scripts, a small model to try it with, the C++ runtime."""
    core.mkdir()
    for name in HOST_FILES:
        shutil.copy(HERE / name, core / name)
    (core / "python").write_text(f"{options.python}\n")
    build_own(core / "own")
    if not options.no_wheels:
        download(CORE, options.python, core / "wheels")
        if "rtx" in options.stages:  # so that the library fits into a piece
            download([RTX_BINDINGS], options.python, core / "wheels", dependencies=False)
        unsqueeze(core / "wheels")
    add_probe(core, options.seed)
    for build in options.cpp:
        add_cpp(core / "cpp", build)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    write_json(core / "kit.json", {
        "format": "tformer-gpu-kit", "version": 3, "date": str(datetime.date.today()),
        "tformer_deploy": __version__, "commit": commit.stdout.strip(), "python": options.python,
        "stages": options.stages, "cpp": bool(options.cpp), "checked": checked, "text": options.text.name,
        "random": {"preset": options.preset, "vocabulary": options.vocab_size, "seed": options.seed,
                   "lengths": BASE_LENGTHS},
    })  # fmt: skip


def fill_models(models: Path, options: argparse.Namespace) -> dict[str, int]:
    """Both models that are checked and measured. Returns how many sentences of each are checked."""
    texts = options.text, options.tgt
    return {
        "trained": add_trained(models, options.bundle, options.checkpoint, texts, options.sentences),
        "base": add_random(models, options.preset, options.vocab_size, options.seed),
    }


def add_cpp(out: Path, build: Path) -> None:
    """The C++ runtime and `tformer-cpp`, in a folder named like the major version of TensorRT. Raises ArtifactError."""
    cache = build / "CMakeCache.txt"
    found = re.search(r"^TENSORRT_INCLUDE_DIR:PATH=(.+)$", cache.read_text(), re.M) if cache.is_file() else None
    if not found:
        raise ArtifactError(f"{build} is no build of the C++ runtime with TensorRT: make cpp-trt TensorRT_ROOT=...")
    version = (Path(found[1]) / "NvInferVersion.h").read_text()
    major = re.search(r"define (?:NV_TENSORRT_MAJOR|TRT_MAJOR_ENTERPRISE) (\d+)", version)
    assert major
    install = ["cmake", "--install", str(build), "--prefix", str(out / major[1]), "--strip"]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)


def add_stages(folder: Path, options: argparse.Namespace) -> list[Path]:
    """The folders beside `core` that were asked for."""
    stages = [folder / name for name in options.stages]
    if "trt86" in options.stages:  # first: it can unpack what is compressed
        stages.insert(0, folder / "python")
    if "rtx" in options.stages:
        download([RTX], options.python, folder / "rtx/wheels", dependencies=False)
        build_source(RTX_PACKAGE, folder / "rtx/wheels")
        unsqueeze(folder / "rtx/wheels")
    if "ort-gpu" in options.stages:
        download(ORT_GPU, options.python, folder / "ort-gpu/wheels", dependencies=False)
    if "trt86" in options.stages:
        add_tensorrt(folder / "trt86")
        add_python(folder / "python")
    return stages


if __name__ == "__main__":
    try:
        main()
    except (TformerError, OSError) as error:
        sys.exit(f"error: {error}")
