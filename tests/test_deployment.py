"""Other, real environments without torch: our wheel and ONNX Runtime, or what builds plans, and a bundle."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tformer_deploy.export.checked import export_checked

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh virtual environment with `tformer-deploy[cpu]` installed from a built wheel."""
    return make_machine(tmp_path_factory.mktemp("machine"), "cpu")


def make_machine(folder: Path, extra: str) -> Path:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=300)
    python = folder / "venv/bin/python"
    install_there(python, extra)
    return python


def install_there(machine: Path, extra: str) -> None:
    (wheel,) = machine.parents[2].glob("*.whl")
    install = [machine, "-m", "pip", "install", "-q", f"{wheel}[{extra}]", "-c", ROOT / "constraints.txt"]
    subprocess.run(install, check=True, timeout=600)


def run_there(machine: Path, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [machine.parent / "tformer", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, cwd=machine.parent)


def test_no_training_packages_are_there(machine: Path) -> None:
    code = "import importlib.util as u; print([m for m in ('torch', 'onnx', 'safetensors') if u.find_spec(m)])"
    assert subprocess.run([machine, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def run_here(*arguments: object, stdin: str = "") -> str:
    command = [sys.executable, "-m", "tformer_deploy", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, timeout=300).stdout


def outputs(text: str) -> list[tuple[list[int], str, bool]]:
    """What --json printed, but for the last digits of scores."""
    rows = [json.loads(line) for line in text.splitlines()]
    return [
        (each["ids"], f"{each['score']:.3f}", each["finished"]) for row in rows for each in [row, *row["alternatives"]]
    ]


@pytest.mark.parametrize(
    ("options", "count"), [((), 3), (("--beams", 4, "--n-best", 4), 9), (("--sample", "--n-best", 3, "--seed", 2), 7)]
)
def test_translates_the_same_without_torch(
    machine: Path, bundle: Path, options: tuple[object, ...], count: int
) -> None:
    command, lines = ("translate", bundle, "--max-tokens", 8, "--json", *options), "w5 w6 w7\n\nw8 w9\n"
    there = run_there(machine, *command, stdin=lines)
    assert there.returncode == 0, there.stderr
    assert outputs(there.stdout) == outputs(run_here(*command, stdin=lines))
    assert len(outputs(there.stdout)) == count


def test_scores_the_same_without_torch(machine: Path, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "src.txt").write_text("w5 w6 w7\nw8\n")
    (tmp_path / "tgt.txt").write_text("w9\nw10 w11\n")
    command = ("score", bundle, "--src", tmp_path / "src.txt", "--tgt", tmp_path / "tgt.txt")
    there = run_there(machine, *command)
    assert there.returncode == 0, there.stderr
    found, expected = ([float(line) for line in text.splitlines()] for text in (there.stdout, run_here(*command)))
    assert found == pytest.approx(expected, abs=1e-4) and len(found) == 2


def test_python_api_works_there(machine: Path, bundle: Path) -> None:
    code = f"""
import sys
from tformer_deploy import load
with load({str(bundle)!r}, beams=3, max_tokens=5) as translator:
    result = translator.translate(["w5 w6"])[0]
    pieces = []
    print(sum(translator.score(["w5 w6"], [result.text])[0]) < 0, len(result.ids))
with load({str(bundle)!r}, max_tokens=5) as translator:
    result = translator.stream("w5 w6", pieces.append)
    print("".join(pieces) == result.text, "torch" in sys.modules, "onnx" in sys.modules)
"""
    done = subprocess.run([machine, "-c", code], capture_output=True, text=True, cwd=machine.parent)
    assert done.stdout.split() == ["True", "5", "True", "False", "False"], done.stderr


def test_a_pipeline_is_opened_there(machine: Path) -> None:
    """Of a bundle, with its texts; a folder that has not been exported needs torch, which is said."""
    bundle, folder = ROOT / "tests/bundles/v2/copy", machine.parent / "folder"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bart"}')
    code = f"""
import sys
from tformer_deploy import TformerError, load, pipeline
texts = ["3 1 4", "6"]
with pipeline("summarization", model={str(bundle)!r}) as summarize, load({str(bundle)!r}) as translator:
    wanted = [result.text for result in translator.translate(texts)]
    print([record["summary_text"] for record in summarize(texts)] == wanted, len(set(wanted)))
print("torch" in sys.modules)
try:
    pipeline("summarization", model={str(folder)!r})
except TformerError as error:
    print(error)
"""
    done = subprocess.run([machine, "-c", code], capture_output=True, text=True, cwd=machine.parent)
    assert done.returncode == 0, done.stderr
    opened, loaded, refused = done.stdout.splitlines()
    assert (opened, loaded) == ("True 2", "False")
    assert "'torch' is not installed: pip install '.[export]'" in refused


def test_inspects_there(machine: Path, bundle: Path) -> None:
    assert "every hash verified" in run_there(machine, "inspect", bundle).stdout


@pytest.mark.parametrize("variant", ["fp32", "int8"])
def test_encodes_the_same_without_torch(machine: Path, variant: str) -> None:
    command = ("encode", ROOT / "tests/bundles/v2/copy", "--variant", variant, "--threads", 1)
    done = run_there(machine, *command, stdin="3 1 4\n\n6\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_here(*command, stdin="3 1 4\n\n6\n") and len(done.stdout.split()) == 32


def test_bench_and_a_variant_run_there(machine: Path, variants_bundle: Path) -> None:
    point = ("--batch", 2, "--beam", 1, "--src-len", 4, "--new-tokens", 4, "--rounds", 1, "--seconds", 0)
    done = run_there(machine, "bench", variants_bundle, "--variant", "int8", *point, "--json")
    assert done.returncode == 0, done.stderr
    command, lines = ("translate", variants_bundle, "--variant", "int8", "--max-tokens", 8), "w5 w6\nw7\n"
    assert run_there(machine, *command, stdin=lines).stdout == run_here(*command, stdin=lines)


def test_named_recipes_are_in_the_wheel(machine: Path) -> None:
    code = "from tformer_deploy.bundle import recipe; print(recipe.load_recipe('fp32').opset, recipe.recipe_folder())"
    done = subprocess.run([machine, "-c", code], capture_output=True, text=True, check=True, cwd=machine.parent)
    assert done.stdout.startswith("23 ") and "site-packages" in done.stdout


@pytest.mark.parametrize(
    "verb",
    [
        "init",
        "train",
        "export",
        "translate",
        "score",
        "check",
        "bench",
        "inspect",
        "shortlist",
        "corpus",
        "distill",
        "student",
    ],
)
def test_every_help_works_there(machine: Path, verb: str) -> None:
    assert "Example: " in run_there(machine, verb, "--help").stdout


def test_missing_extras_are_named(machine: Path, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("w5\n")
    for arguments in (
        ["train", "--task", "copy", "--out", tmp_path / "run"],
        ["translate", bundle, "--backend", "eager"],
        ["score", bundle, "--src", tmp_path / "lines", "--tgt", tmp_path / "lines", "--backend", "eager"],
        ["check", bundle],
        ["init", "--preset", "tiny", "--vocab-size", 99, "--out", tmp_path / "run"],
    ):
        done = run_there(machine, *arguments)
        assert done.returncode == 1
        assert (
            done.stderr.startswith("error: the package '") and "pip install '.[train]' in a checkout" in done.stderr
        ), done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_translates_a_corpus_there(machine: Path, bundle: Path, tmp_path: Path) -> None:
    """Text needs no more packages; what needs some says which."""
    (tmp_path / "a.txt").write_text("w5 w6 w7\n\nw8 w9\n")
    (tmp_path / "a.zst").write_text("")
    corpus = ("corpus", bundle, "--max-tokens", 8, "--out", tmp_path / "out")
    done = run_there(machine, *corpus, "--in", tmp_path / "a.txt", "--merge")
    assert done.returncode == 0, done.stderr
    expected = run_here("translate", bundle, "--max-tokens", 8, stdin=(tmp_path / "a.txt").read_text())
    assert (tmp_path / "out/merged.txt").read_text() == expected
    for more, package, extra in (
        ((tmp_path / "a.zst",), "zstandard", "corpus"),
        (("s3://bucket/a.txt",), "fsspec", "corpus"),
        ((tmp_path / "a.txt", "--address", "auto", "--beams", 2), "ray", "cluster"),
    ):
        done = run_there(machine, *corpus, "--force", "--in", *more)
        wanted = (
            f"error: the package '{package}' is not installed: pip install '.[{extra}]' in a checkout of tformer-deploy"
        )
        assert done.stderr.splitlines() == [wanted]


def test_builds_plans_from_a_fresh_install(run: Path, tmp_path: Path) -> None:
    """Of the extra trt-rtx; half precision is calibrated with ONNX Runtime as well."""
    there, bundle, text = make_machine(tmp_path, "trt-rtx"), tmp_path / "bundle", tmp_path / "text"
    export_checked(run, bundle, ["fp32", "trt"])
    text.write_text("w5 w6\nw7\n")
    command = ("build", bundle, "--src", text, "--profile", "2x2x8x8")
    done = run_there(there, *command, "--precision", "fp32")
    assert done.returncode == 0 and "matmuls: " in done.stdout and done.stdout.endswith("plans written\n"), done.stderr
    done = run_there(there, *command)
    assert done.returncode == 1
    assert (
        done.stderr
        == "error: the package 'onnxruntime' is not installed: pip install '.[cpu]' in a checkout of tformer-deploy\n"
    )
    install_there(there, "cpu")
    done = run_there(there, *command)
    assert done.returncode == 0 and "calibrated with 2 sentences of text" in done.stdout, done.stderr
    assert len(list((bundle / "trt/plans").glob("*/*.plan"))) == 4
    assert "every hash verified" in run_there(there, "inspect", bundle).stdout


def test_a_machine_without_a_compiler_goes_without_the_native_engine(tmp_path: Path) -> None:
    for tool in ("dirname", "cmake", "ninja"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "/bin/true")
    command = ["/bin/bash", ROOT / "engines/install-native", sys.executable]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == (
        "skipped: tformer-native, which --backend native and cpp need: "
        "c++ is not installed (apt-get install cmake ninja-build g++)\n"
    )
