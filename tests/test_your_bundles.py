"""Bundles of modules of a user's own: exported and checked by the command, and never run because a manifest says so."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.bench.worker import needed_files
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.check import CheckOptions, Corpus, Gate
from tformer_deploy.engines import make_engine

from .command import failed_line, printed, run_here
from .mutations import break_graph, drop_mask, scale_token
from .user_models import MODELS, VOCAB, require_own_tokens, sources

pytestmark = pytest.mark.long

EXPORTED = ("tutorial", "tutorial, hooks", "annotated, hooks", "bart, hooks")
QUICK = CheckOptions(max_tokens=6, beams=2, n_best=2, invariance=0, wide=0, large_tokens=0, positions=6, walks=4)


def write(folder: Path, name: str, extra: str = "") -> Path:
    """A file whose `make` is one of MODELS."""
    path = folder / "my_file.py"
    text = "from pathlib import Path\nfrom tests.user_models import MODELS, annotated, hugging_face, tutorial\n"
    path.write_text(
        f"{text}\ndef make():\n    Path(__file__).with_suffix('.ran').touch()\n    return MODELS[{name!r}]()\n"
    )
    path.write_text(f"{path.read_text()}\n{extra}\n")
    return path


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each of EXPORTED a file and its exported and checked bundle, by the command itself. Read only."""
    found = {}
    for name in EXPORTED:
        folder = tmp_path_factory.mktemp("own")
        write(folder, name)
        done = run_here("export", f"{folder}/my_file.py:make", "--out", folder / "bundle")
        assert done.returncode == 0, done.stderr
        said = done.stderr.decode().splitlines()
        assert said[0] == said[-1] == f"running {folder}/my_file.py"
        slow = {"tutorial": "encode=, decode=, layers=, self_attention=", "annotated, hooks": "encode=, decode="}
        assert len(said) == 2 + (name in slow) and slow.get(name, "") in said[1]
        found[name] = folder / "bundle"
    return found


@pytest.mark.parametrize("name", EXPORTED)
def test_bundles_give_the_modules_own_tokens(bundles: dict[str, Path], name: str) -> None:
    with make_engine("ort", open_bundle(bundles[name]), threads=1) as engine:
        require_own_tokens(engine, MODELS[name]())


def test_a_bundle_translates_words_without_its_module(bundles: dict[str, Path]) -> None:
    done = run_here("translate", bundles["tutorial, hooks"], stdin=b"w7 w9\n\nw8\n")
    lines = printed(done)
    assert len(lines) == 3 and lines[0] and not lines[1] and set(lines[0].split()) <= {f"w{i}" for i in range(VOCAB)}
    assert b"running" not in done.stderr
    assert "a module of " in "\n".join(printed(run_here("inspect", bundles["tutorial, hooks"])))


def test_a_stored_reference_needs_no_module(bundles: dict[str, Path], tmp_path: Path) -> None:
    bundle, file = bundles["tutorial, hooks"], tmp_path / "eager.npz"
    named = bundle.parent / "my_file.py:make"
    printed(run_here("check", bundle, "--checkpoint", named, "--save-reference", file, "--invariance", 0))
    done = run_here("check", shutil.copytree(bundle, tmp_path / "elsewhere"), "--reference", file)
    assert done.returncode == 0 and b"running" not in done.stderr, done.stderr


@pytest.mark.parametrize("verb", ["check", "translate"])
def test_a_manifest_runs_no_file(bundles: dict[str, Path], verb: str, tmp_path: Path) -> None:
    shutil.copytree(bundles["tutorial"].parent, tmp_path / "stranger")
    bundle, ran = tmp_path / "stranger/bundle", tmp_path / "stranger/my_file.ran"
    ran.unlink()
    backend = [] if verb == "check" else ["--backend", "eager"]
    line = failed_line(run_here(verb, bundle, *backend, stdin=b"w7\n"))
    assert f"which tformer runs only if you say so: --checkpoint {bundle}/../my_file.py:make" in line
    assert not ran.exists()
    with pytest.raises(ArtifactError, match="only if you say so"):
        needed_files(open_bundle(bundle), None, "eager", None)  # type: ignore[arg-type]


def test_a_file_that_is_named_is_run_again(bundles: dict[str, Path]) -> None:
    bundle = bundles["tutorial"]
    named = bundle.parent / "my_file.py:make"
    done = run_here("translate", bundle, "--backend", "eager", "--checkpoint", named, stdin=b"w7 w9\n")
    assert printed(done) == printed(run_here("translate", bundle, stdin=b"w7 w9\n"))
    assert done.stderr.decode().splitlines()[0] == f"running {bundle.parent}/my_file.py"
    assert needed_files(open_bundle(bundle), None, "eager", str(named)) == [bundle.parent / "my_file.py"]  # type: ignore[arg-type]


def test_other_weights_are_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    changed = "    user = tutorial()\n    user.module.output.bias.data[7] += 1e-3\n    return user"
    path = write(tmp_path, "tutorial", f"def changed():\n{changed}")
    done = run_here("check", bundles["tutorial"], "--checkpoint", f"{path}:changed")
    assert done.returncode == 1 and b"was not exported from the weights in" in done.stderr
    assert b"load its weights from a file, or set a seed" in done.stderr


@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        ("tutorial", drop_mask(1)),
        ("tutorial, hooks", drop_mask(1)),
        ("annotated, hooks", scale_token("module.generator", 9)),
    ],
)
def test_graphs_that_are_wrong_fail(bundles: dict[str, Path], name: str, mutate: Any, tmp_path: Path) -> None:
    broken = open_bundle(break_graph(bundles[name], tmp_path / "broken", "decoder_step", mutate))
    gate = Gate(broken, bundles[name].parent / "my_file.py:make", threads=1)
    corpus = Corpus("a few", [list(source) for source in sources()], QUICK)
    report = gate.run(["ort"], gate.reference(corpus))
    assert any("scores differ by" in failure for failure in report.failures), str(report)


def test_a_module_that_chooses_by_values_is_said_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "my_file.py"
    path.write_text(
        "import torch\nfrom tests.user_models import tutorial\n\n\ndef forward(m, src, mask, tgt):\n"
        "    if (tgt > 3).any():\n        src = src + 0\n    return m(src, tgt, ~mask)\n\n\n"
        "def make():\n    return tutorial(forward=forward)\n"
    )
    done = run_here("export", f"{path}:make", "--out", tmp_path / "bundle")
    line = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 1 and not (tmp_path / "bundle").exists()
    assert "my_file.py, line 6: torch.export of the module raised" in line and "a choice by values, such as" in line
