"""`tformer export --layout`: files of other runtimes, proven in them, or refused in one line."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tformer_deploy.base.errors import ParityError, TformerError
from tformer_deploy.base.files import sha256
from tformer_deploy.bundle.text import SPECIALS, ByteBpe, Tokenizers, WordBpe, Words
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.layouts import ctranslate2, marian
from tformer_deploy.export.layouts.text_files import write_tokenizers
from tformer_deploy.export.layouts.tokens import unique
from tformer_deploy.export.layouts.written import between, compare, open_layout_source, outputs_of, write_layout
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.run import import_checkpoint
from tformer_deploy.model.checkpoint import load_tensors, model_tensors, open_checkpoint, save_checkpoint, save_tensors

from .command import failed_line, printed, run_here
from .configs import CONFIGS
from .conftest import VOCAB, random_model, small_config, write_checkpoint
from .params import long_but
from .plain_toolkits import Marian

translators = pytest.importorskip("ctranslate2")
DEMO = Path(__file__).parent.parent / ".demo"
REFUSED = {
    "annotated, nothing shared": "model.norm=annotated",
    "annotated post-norm, a large eps": "model.norm=annotated",
    "norms of queries and keys": "model.qk_norm=true",
    "every option": "model.qk_norm=true",
    "relative positions of each layer": "model.relative_per_layer=true",
}
ALL = ("float32 greedy", "float32 beams 4", "int8 greedy", "int8 beams 4")


@pytest.fixture(scope="module")
def folder(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model for CTranslate2."""
    out = tmp_path_factory.mktemp("layouts") / "ctranslate2"
    write_layout(run, out, "ctranslate2")
    return out


def exact(report: Any) -> bool:
    """Whether something was compared, and all outputs that must be equal are, without a tie."""
    needed = [each for each in report.proofs if each.precision == "float32"]
    return bool(needed) and all(0 < each.sentences == each.equal for each in needed)


# --- the command ----------------------------------------------------------------------------------------------------


def test_a_folder_says_what_made_it_and_what_proves_it(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    [line] = printed(run_here("export", run, "--layout", "ctranslate2", "--out", out, "--json"))
    found, header = json.loads(line), json.loads((out / "tformer-layout.json").read_text())
    assert found["folder"] == str(out) and found["check"]["layout"] == "ctranslate2"
    assert header["checked"] and header["checkpoint"] == {"weights_sha256": open_checkpoint(run).weights_sha256}
    assert header["versions"]["ctranslate2"] == translators.__version__
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert set(header["files"]) == files - {"tformer-layout.json"} and "int8/model.bin" in files
    assert all(sha256(out / name) == hashed for name, hashed in header["files"].items())
    named = [f"{each['precision']} {'beams 4' if each['beams'] > 1 else 'greedy'}" for each in header["proofs"]]
    assert tuple(named) == ALL
    assert all(each["equal"] == each["sentences"] > 10 for each in header["proofs"][:2])


def test_a_folder_is_replaced_only_with_force(run: Path, bundle: Path, folder: Path, tmp_path: Path) -> None:
    written = (folder / "tformer-layout.json").stat().st_mtime_ns
    ask = ("export", run, "--layout", "ctranslate2", "--out")
    assert "exists already" in failed_line(run_here(*ask, folder))
    lines = printed(run_here(*ask, folder, "--force"))
    assert lines[1] == "  float32  greedy    16 of 16 sentences equal, 0 ties, 0 differ"
    assert (folder / "tformer-layout.json").stat().st_mtime_ns > written
    assert "is not a layout and stays as it is" in failed_line(run_here(*ask, bundle, "--force"))


def test_a_bundle_leads_to_its_checkpoint(bundle: Path, folder: Path, tmp_path: Path) -> None:
    write_layout(bundle, tmp_path / "out", "ctranslate2")
    models = [each / "float32/model.bin" for each in (tmp_path / "out", folder)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_what_cannot_be_asked_is_one_line(run: Path, tmp_path: Path) -> None:
    ask = ("export", run, "--out", tmp_path / "out", "--layout")
    assert "did you mean 'ctranslate2'?" in failed_line(run_here(*ask, "ctranslate"))
    for option in (("--recipe", "int8"), ("--tgt", "x"), ("--calibrate", "x"), ("--memory",)):
        assert f"{option[0]}: not with --layout" in failed_line(run_here(*ask, "ctranslate2", *option))
    assert "layout marian cannot say model.norm_eps=1e-05: " in failed_line(run_here(*ask, "marian"))
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_module_of_the_users_own_is_refused_by_layouts_that_write_our_network(tmp_path: Path) -> None:
    module = tmp_path / "model.py"
    module.write_text("from tests.test_layouts import user_model\n")
    for name in ("ctranslate2", "marian"):
        done = run_here("export", f"{module}:user_model", "--out", tmp_path / "out", "--layout", name)
        assert done.returncode == 1 and not (tmp_path / "out").exists()
        assert f"error: layout {name} cannot say a module of your own" in done.stderr.decode().splitlines()[-1]


def user_model() -> Any:
    """A module of a user's own."""
    from .user_models import MODELS

    return next(iter(MODELS.values()))()


def test_a_runtime_whose_tokens_differ_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are written wrongly show in the outputs of the real runtime."""
    right = ctranslate2.position_table
    monkeypatch.setattr(ctranslate2, "position_table", lambda *given: right(*given)[::-1].copy())
    done = run_here("export", run, "--layout", "ctranslate2", "--out", tmp_path / "out")
    line = failed_line(done, 3)
    assert "out not written, ctranslate2 differs: float32: sentence" in line and "eager has [" in line
    assert [*tmp_path.iterdir()] == []


def test_a_runtime_that_is_missing_is_said_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marian, "find_spec", lambda name: None)
    done = run_here("export", marian_run(tmp_path), "--layout", "marian", "--out", tmp_path / "out")
    assert printed(done)[0].startswith("marian: NOT CHECKED: the Python package 'pymarian' is not installed")
    assert "warning: layout marian is not checked" in done.stderr.decode()
    header = json.loads((tmp_path / "out/tformer-layout.json").read_text())
    assert not header["checked"] and "pip install pymarian" in header["unproven"] and header["proofs"] == []


# --- what is compared -----------------------------------------------------------------------------------------------


def test_another_output_is_a_tie_only_if_eager_ranks_it_as_high(run: Path) -> None:
    sources, options = [[5, 6, 7, 3], [8, 9, 3]], DecodeOptions(max_tokens=12)
    with EagerEngine(open_checkpoint(run).load_model()) as eager:
        wanted = outputs_of(eager, sources, options)
        ids = [each.ids for each in wanted]
        assert compare(eager, sources, options, wanted, ids, True).equal == 2
        other = compare(eager, sources, options, wanted, [ids[0], [*ids[1][:-1], 40]], True)
        assert (other.equal, other.ties, len(other.differ)) == (1, 0, 1) and "sentence 2 with 1 beams" in other.differ[
            0
        ]
        eager.model.output.weight.data[41] = eager.model.output.weight.data[ids[1][0]]
        tied = compare(eager, sources, options, wanted, [ids[0], [41]], True)
        assert (tied.equal, tied.ties) == (1, 1)


def test_generated_sources_are_as_the_tokenizers_frame_them() -> None:
    words = Words([*SPECIALS, "a", "b"], None)
    assert between([[3], [4, 5, 9, 3]], Tokenizers(words, words), 8) == [[4, 5, 3]]
    framed = Tokenizers(words, words, (2,), (3, 4))
    assert between([[4, 5, 5, 5, 3]], framed, 5) == [[2, 4, 5, 3, 4]]


def test_no_two_tokens_are_alike() -> None:
    assert unique(["</s>", "a", "", "a", "</s>", "<1>"], [0]) == ["</s>", "<<1>>", "<2>", "a", "<4>", "<1>"]


# --- ctranslate2 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", long_but(list(CONFIGS), "post-norm", "T5", "every option"))
def test_every_kind_of_model_is_equal_in_ctranslate2_or_refused(name: str, tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path / "run", small_config(**CONFIGS[name]))
    if name in REFUSED:
        with pytest.raises(TformerError, match=f"layout ctranslate2 cannot say {REFUSED[name]}"):
            write_layout(run, tmp_path / "out", "ctranslate2")
        return
    assert exact(write_layout(run, tmp_path / "out", "ctranslate2"))


def test_users_of_ctranslate2_translate_with_the_files_of_the_folder(tmp_path: Path) -> None:
    """As docs/anywhere.md says: sentencepiece's pieces in, pieces out."""
    run, out, lines = DEMO / "run", tmp_path / "out", ["nine hundred and two", "forty-two"]
    if not run.is_dir():
        pytest.skip("needs the demo's model: make demo")
    from sentencepiece import SentencePieceProcessor

    write_layout(run, out, "ctranslate2")
    for precision in ctranslate2.PRECISIONS:
        pieces = SentencePieceProcessor(model_file=str(out / precision / "tokenizer.model"))
        translator = translators.Translator(str(out / precision))
        found = translator.translate_batch(pieces.encode(lines, out_type=str), beam_size=4)
        assert [pieces.decode(each.hypotheses[0]) for each in found] == ["neunhundertzwei", "zweiundvierzig"]


def test_what_is_written_for_ctranslate2_can_be_imported_again(tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path / "run", small_config(output_bias=True, share_embeddings="none", tgt_vocab=45))
    write_layout(run, tmp_path / "out", "ctranslate2")
    _, found = import_checkpoint("ctranslate2", tmp_path / "out/float32", tmp_path / "again")
    assert found.passed
    ours, theirs = (load_tensors(open_checkpoint(each).weights) for each in (run, tmp_path / "again"))
    assert theirs.keys() - ours.keys() == {"src_positions", "tgt_positions"}
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    first, second = (open_checkpoint(each).tokenizers for each in (run, tmp_path / "again"))
    assert first.source_ids("w5 w9 nothing") == second.source_ids("w5 w9 nothing") == [5, 9, 0, 3]


def test_decoding_options_are_followed_or_left_out_and_said(tmp_path: Path) -> None:
    config = small_config(output_bias=True)
    model = random_model(config)
    model.output.bias.data[[3, 20]] -= 2.0  # after a prefix, CTranslate2 ends only the first beam at once
    save_tensors(tmp_path / "run/w.safetensors", model_tensors(model))
    words = Words([*SPECIALS, *(f"w{i}" for i in range(4, VOCAB))], None)
    decoding = {
        "first_ids": [7],
        "first_adds_zero": True,
        "suppress": [9, 10],
        "bad_words": [[11, 12]],
        "no_repeat_ngram": 2,
        "min_tokens": 5,
        "end_ids": [3, 20],
        "length_penalty": 0.6,
        "beams": 3,
        "stop": "estimate",
        "repetition_penalty": 1.2,
        "forced_end": True,
    }
    tokenizers = Tokenizers(words, words, (2,), (3,))
    save_checkpoint(tmp_path / "run", config, tokenizers, tmp_path / "run/w.safetensors", {}, decoding)
    report = write_layout(tmp_path / "run", tmp_path / "out", "ctranslate2")
    assert exact(report)
    left_out = {line.split("=")[0] for line in report.left_out}
    assert left_out == {
        "stop",
        "repetition_penalty",
        "forced_end",
        "suppress",
        "bad_words",
        "no_repeat_ngram",
        "min_tokens",
    }
    assert json.loads((tmp_path / "out/tformer-layout.json").read_text())["left_out"] == report.left_out
    described = json.loads((tmp_path / "out/int8/config.json").read_text())
    assert described["add_source_bos"] and described["add_source_eos"]
    greedy, _ = ctranslate2.nearest(DecodeOptions(**{**decoding, "beams": 1, "stop": "count", "length_penalty": 1.0}))
    assert greedy.suppress == (9, 10) and greedy.no_repeat_ngram == 2 and greedy.min_tokens == 5


def test_the_benchmark_converts_the_same_weights_with_ids_as_tokens(run: Path, folder: Path, tmp_path: Path) -> None:
    from benchmarks.peers.to_ctranslate2 import convert

    convert(run, tmp_path)
    assert (tmp_path / "float32/model.bin").read_bytes() == (folder / "float32/model.bin").read_bytes()
    translator = translators.Translator(str(tmp_path / "float32"))
    with EagerEngine(open_checkpoint(run).load_model()) as eager:
        [wanted] = outputs_of(eager, [[5, 6, 7, 3]], DecodeOptions(max_tokens=12))
    [found] = translator.translate_batch([["5", "6", "7", "3"]], beam_size=1, max_decoding_length=12)
    assert [int(token) for token in found.hypotheses[0]] == wanted.ids


FAMILIES = ("marian", "bart", "m2m_100", "mbart", "pegasus", "t5", "blenderbot", "fsmt", "plbart", "flan-t5")


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_imported_families_are_equal_in_ctranslate2(name: str, tmp_path: Path) -> None:
    """200 lines of text, greedy and beams of 4, by random weights."""
    from .hf_folders import FOLDERS, LINES, OPTIONS

    options = ImportOptions(**OPTIONS.get(name, {}))
    import_checkpoint("hf", FOLDERS[name](tmp_path / "hf"), tmp_path / "run", options, comparing=False)
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in LINES[:200]), encoding="utf-8")
    report = write_layout(tmp_path / "run", tmp_path / "out", "ctranslate2", tmp_path / "lines")
    assert exact(report) and report.proofs[0].sentences == 200


def test_files_for_programs_that_split_text(tmp_path: Path) -> None:
    entries = [*SPECIALS, "a@@", "b", "ab"]
    coded = WordBpe(entries, ["a b</w>"], Words(entries, None).specials)
    bytewise = ByteBpe([*SPECIALS, "a", "b", "ab"], ["a b"], coded.specials)
    write_tokenizers(Tokenizers(coded, bytewise), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("source.json", "source.codes", "target.json", "target.merges.txt", "target.vocab.json")
    }
    assert (tmp_path / "source.codes").read_text() == "#version: 0.2\na b</w>\n"
    assert json.loads((tmp_path / "target.vocab.json").read_text())["ab"] == 6


# --- marian ---------------------------------------------------------------------------------------------------------


def marian_run(folder: Path, positions: int = 40, **how: Any) -> Path:
    """A run of a model that Marian saved, beside it."""
    made = Marian(pre=False, **how)
    path = made.write(folder)
    options = dataclasses.replace(made.options(path), model={"max_positions": positions})
    import_checkpoint("marian", path, folder / "run", options, comparing=False)
    return folder / "run"


MARIAN: dict[str, dict[str, Any]] = {
    "tied": {"tied": True, "activation": "swish"},
    "three tables": {"activation": "relu"},
    "gelu": {"activation": "gelu", "tied": True},
    "ssru": {"ssru": True, "tied": True},
}


@pytest.mark.parametrize("name", MARIAN)
def test_what_is_written_for_marian_is_what_was_imported(name: str, tmp_path: Path) -> None:
    """Every tensor, bit by bit, every word, and the same model when it is imported again."""
    import numpy as np

    run, out = marian_run(tmp_path, **MARIAN[name]), tmp_path / "out"
    out.mkdir()
    marian.write(open_layout_source(run), out)
    theirs, ours = np.load(tmp_path / "model.npz"), np.load(out / "model.npz")
    assert sorted(theirs) == sorted(ours)
    for key in set(theirs) - {"special:model.yml"}:
        assert theirs[key].shape == ours[key].shape and np.array_equal(theirs[key], ours[key]), key
    for side in ("source", "target"):
        assert (out / f"{side}.yml").read_text() == (tmp_path / "vocab.yml").read_text()
    options = ImportOptions(src_vocab=out / "source.yml", tgt_vocab=out / "target.yml", model={"max_positions": 40})
    import_checkpoint("marian", out / "model.npz", tmp_path / "again", options, comparing=False)
    first, second = open_checkpoint(run), open_checkpoint(tmp_path / "again")
    assert first.config == second.config
    assert first.weights.read_bytes() == second.weights.read_bytes()


def test_what_marian_cannot_say_is_named(run: Path, tmp_path: Path) -> None:
    """A model of ours has another table of positions, and starts from an embedding."""
    cannot = "; ".join(marian.refuse(open_layout_source(run)))
    for part in ("model.norm_eps=1e-05: its norms add 1e-06", "norm_position=pre", "positions=sinusoidal: it"):
        assert part in cannot
    config = small_config(positions="learned", norm_position="post", final_norm=False, norm_eps=1e-6, head_dim=4)
    cannot = "; ".join(marian.refuse(open_layout_source(write_checkpoint(tmp_path / "run", config))))
    assert "src_positions: it computes sines" in cannot and "model.start_id=2: its decoder starts from" in cannot
    assert "model.head_dim=4" in cannot and "norm_eps" not in cannot


@pytest.fixture(scope="module")
def pymarian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, which has a gigabyte, apart from the environment of the tests."""
    import subprocess
    import sys

    if found := find_spec("pymarian"):
        return Path(str(found.origin)).parent.parent
    folder = tmp_path_factory.mktemp("pymarian")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, "pymarian==1.12.42"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"pymarian cannot be installed: {done.stderr[-200:]}")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", MARIAN)
def test_marian_itself_gives_our_tokens(
    name: str, tmp_path: Path, pymarian: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(pymarian))
    monkeypatch.setenv("PYTHONPATH", str(pymarian))
    report = write_layout(marian_run(tmp_path, **MARIAN[name]), tmp_path / "out", "marian")
    assert exact(report) and report.proofs[0].sentences > 10
    right = marian.tensors_of
    monkeypatch.setattr(marian, "tensors_of", lambda *given: {k: v * 1.2 for k, v in right(*given).items()})
    with pytest.raises(ParityError, match="pymarian differs"):
        write_layout(tmp_path / "run", tmp_path / "other", "marian")
