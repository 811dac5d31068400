"""The architecture, read from the code: imports go down, heavy ones stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tformer_deploy"

LIST = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").split("```layers\n")[1].split("```")[0]
LEVELS = [line.split("   ")[0].split(", ") for line in LIST.splitlines()]
"""Highest first; a module imports from its own level or a lower one."""
HEAVY = {
    "torch": {
        "model.cpu_training",
        "model.network",
        "model.positions",
        "model.ssru",
        "model.checkpoint",
        "train.bf16",
        "train.loop",
        "train.losses",
        "train.objective",
        "train.projected",
        "train.quantized",
        "train.runs",
        "train.teacher",
        "train.tensors",
        "engines.eager",
        "export.calibrate",
        "export.graphs",
        "export.layouts.hf_graphs",
        "export.layouts.hf_runtime",
        "export.layouts.marian",
        "export.layouts.one_file.search",
        "export.trace",
        "model.seq2seq",
        "importers.annotated",
        "importers.base",
        "importers.compare",
        "importers.hf",
        "importers.hf_original",
        "importers.torch",
        "importers.ctranslate2",
        "importers.ctranslate2_file",
        "importers.fairseq",
        "importers.joeynmt",
        "importers.marian",
        "importers.opennmt_py",
        "importers.sockeye",
        "importers.toolkit",
        "importers.weights",
        "model.modules.probe",
        "model.modules.recompute",
        "model.modules.running",
        "model.modules.user_model",
    },
    "onnx": {
        "export.build",
        "check.constants",
        "check.unrounded",
        "export.for_86",
        "export.half",
        "export.layouts.hf_graphs",
        "export.layouts.one_file",
        "export.passes.native.bias",
        "export.save",
        "export.to_onnx",
        "export.signature",
        "engines.ort.layers",
        "engines.ort.ranges",
    },
    "onnxruntime": {"engines.ort.library"},  # which turns its telemetry off first
    "openvino": {"engines.openvino"},  # which turns its telemetry off first
    "polygraphy": {"engines.trt.api", "export.trt_builder"},
    "cuda": {"engines.trt.cuda"},
    "safetensors": {"model.checkpoint", "importers.weights"},
    "spacy": {"bundle.text.words"},
    "ctranslate2": {"importers.ctranslate2", "export.layouts.ctranslate2"},
    "yaml": {"importers.toolkit"},
    "tformer_native": {"engines.native", "bench.ceiling"},
    "sentencepiece": {"bundle.text.pieces", "export.layouts.hf_tokenizer", "importers.hf_rebuilt"},
    "matplotlib": {"train.metrics", "base.pages.figures", "bench.figures", "check.figures"},
    "jinja2": {"base.pages.page"},
    "sacrebleu": {"train.metrics"},
    "sacremoses": {"train.moses"},
    "num2words": {"train.data"},
    "ray": {"translate.corpus.on_ray", "serve.on_ray"},
    "fsspec": {"translate.corpus.remote"},
    "pyarrow": {"translate.corpus.tables"},
    "zstandard": {"translate.corpus.zst"},
}


def modules() -> dict[str, Path]:
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return names


def imports(name: str, path: Path) -> tuple[set[str], set[str]]:
    """Modules of the package and top-level packages outside it that a file imports, anywhere in it."""
    inside, outside = set(), set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    if name == "__init__":
        package = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            outside.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            target = ".".join(part for part in base if part)
            names = {f"{target}.{alias.name}".strip(".") for alias in node.names}
            inside |= {target} if node.module else {each if each in modules() else target for each in names}
    return {module or "__init__" for module in inside}, outside


def level(name: str) -> int:
    for number, names in enumerate(LEVELS):
        if name in names:
            return number
    return level(name.rsplit(".", 1)[0]) if "." in name else -1


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_down(name: str) -> None:
    assert level(name) >= 0, f"{name} has no level: add it to the list in CONTRIBUTING.md"
    inside, outside = imports(name, modules()[name])
    for target in inside:
        if target == "__init__":  # __version__, or `load` for the commands
            continue
        assert level(target) >= level(name), f"{name} imports {target}, which stands above it"
        if level(target) == level(name) and {name.split(".")[0], target.split(".")[0]} == {"export", "engines"}:
            raise AssertionError(f"{name} imports {target}: export and engines never see each other")
        if name.split(".")[0] == "decoding":
            assert (
                target in {"engines.base", "model.config", "base.errors", "base.messages", "base.settings"}
                or target.split(".")[0] == "decoding"
            )
    assert "tformer_deploy" not in outside, "import relatively, so that this test sees it"
    for package, homes in HEAVY.items():
        assert package not in outside or name in homes, f"{name} imports {package}"


def test_no_circles() -> None:
    """Between files, imports inside functions included; every import runs the package's own `__init__` first."""
    graph = {
        name: imports(name, path)[0] - {name, "__init__"} for name, path in modules().items() if name != "__init__"
    }
    assert {"search", "rules"} & {target.rpartition(".")[2] for target in graph["decoding"]}, "imports are seen"
    # Take away what imports nothing that is left, until nothing or circles are left.
    while leaves := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    left = {name: sorted(targets & graph.keys()) for name, targets in graph.items()}
    assert not left, f"in circles, or importing them: {left}"


def test_package_and_help_import_nothing_heavy() -> None:
    code = (
        "import sys, tformer_deploy\n"
        "from tformer_deploy.cli import app\n"
        "heavy = ('torch', 'onnx', 'onnxruntime', 'numpy', 'sentencepiece', 'spacy', 'jinja2', 'ray', 'fsspec')\n"
        "print([m for m in heavy if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
