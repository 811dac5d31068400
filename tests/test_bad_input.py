"""A user's mistake: one line that says what, where and how to fix it, exit code 1, and nothing written."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.base.files import sha256
from tformer_deploy.base.headers import digest
from tformer_deploy.cli import main
from tformer_deploy.model.checkpoint import load_tensors, open_checkpoint, save_tensors

from .command import without_progress
from .conftest import small_config, write_checkpoint

WEIGHTS = "weights/random.safetensors"
FILES = "--src src.txt --tgt tgt.txt --valid-src src.txt --valid-tgt tgt.txt"
SMALL = "--set model.d_model=16 --set model.d_ff=16 --set model.encoder_layers=1 --set model.decoder_layers=1"
TRAIN = f"train --out out {FILES} --vocab-size 30 --updates 1 {SMALL}"


def edit_header(run: Path, **changes: Any) -> None:
    """Replace keys of checkpoint.json, and its own hash; None removes one."""
    path = run / "checkpoint.json"
    header = {**json.loads(path.read_text()), **changes}
    header = {key: value for key, value in header.items() if value is not None}
    path.write_text(json.dumps({**header, "sha256": digest(header)}))


def edit_weights(run: Path, edit: Callable[[Path], object], rehash: bool = False) -> None:
    """Change the weights file, and its hash in the header if asked to."""
    edit(run / WEIGHTS)
    if rehash:
        hashes = json.loads((run / "checkpoint.json").read_text())["files"]
        edit_header(run, files={**hashes, WEIGHTS: sha256(run / WEIGHTS)})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


def drop_tensor(path: Path) -> None:
    save_tensors(path, {name: tensor for name, tensor in load_tensors(path).items() if name != "encoder_norm.weight"})


DAMAGES: dict[str, Callable[[Path], object]] = {
    "headless": lambda run: (run / "checkpoint.json").unlink(),
    "nonsense": lambda run: (run / "checkpoint.json").write_text('{"format": "tformer-chec'),
    "list": lambda run: (run / "checkpoint.json").write_text("[1, 2]"),
    "foreign": lambda run: edit_header(run, format="other-checkpoint"),
    "newer": lambda run: edit_header(run, version=99),
    "hashless": lambda run: edit_header(run, files=None),
    "modelless": lambda run: edit_header(run, model=None),
    "heads": lambda run: edit_header(run, model=dataclasses.asdict(small_config()) | {"heads": 5}),
    "lost": lambda run: (run / WEIGHTS).unlink(),
    "truncated": lambda run: edit_weights(run, cut),
    "edited": lambda run: edit_weights(run, flip),
    "rehashed": lambda run: edit_weights(run, cut, rehash=True),
    "incomplete": lambda run: edit_weights(run, drop_tensor, rehash=True),
    "words": lambda run: (run / "tokenizer.words").write_text("one\ntwo\n"),
    "older": lambda run: ((run / "train").mkdir(), (run / "train/state.safetensors").write_bytes(b"tensors")),
    "state": lambda run: ((run / "train").mkdir(), (run / "train/state.json").write_text('{"format": "tformer-tr')),
    "retouched": lambda run: (run / "checkpoint.json").write_text(
        (run / "checkpoint.json").read_text().replace('"heads": 4', '"heads": 8')
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good and bad files of every kind."""
    folder = tmp_path_factory.mktemp("place")
    lines = [f"{a} {b}" for a in ("red", "green", "blue") for b in ("house", "tree", "dog")]
    text = "\n".join(lines) + "\n"
    (folder / "src.txt").write_text(text)
    (folder / "tgt.txt").write_text(text)
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text("\n \n" * 4 + "\n")
    (folder / "short.txt").write_text("\n".join(lines[:7]) + "\n")
    (folder / "latin1.txt").write_bytes(text.replace("green dog", "grün dog").encode("latin-1"))
    (folder / "cut.gz").write_bytes(gzip.compress(text.encode())[:-12])
    (folder / "plain.gz").write_text(text)
    (folder / "garbage.gz").write_bytes(gzip.compress(text.encode())[:10] + b"\xff" * 50)
    (folder / "folder").mkdir()
    (folder / "broken.toml").write_text("[model]\nd_model = = 3\n")
    (folder / "section.toml").write_text("[modle]\nd_model = 32\n")
    (folder / "key.toml").write_text("[train]\nwarmpu = 32\n")
    (folder / "kind.toml").write_text('[model]\nmax_positions = "wide"\n')
    (folder / "flat.toml").write_text("model = 3\n")
    (folder / "latin1.toml").write_bytes(b"# gr\xfcn\n[model]\n")
    write_checkpoint(folder / "good", small_config())
    for name, damage in DAMAGES.items():
        shutil.copytree(folder / "good", folder / name)
        damage(folder / name)
    return folder


@pytest.fixture(autouse=True)
def nothing_changes(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs in that folder and must leave it as it was."""
    monkeypatch.chdir(place)
    before = contents(place)
    yield
    after = contents(place)
    for name in after.keys() - before.keys():
        shutil.rmtree(place / name, ignore_errors=True)
    assert sorted(after.keys() ^ before.keys()) == []
    assert [name for name in before if after[name] != before[name]] == []


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def tformer(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["tformer", *shlex.split(command)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def assert_one_line(err: str, words: str) -> None:
    lines = without_progress(err)
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    for word in words.split(" + "):
        assert word in lines[0]


BAD_TEXT = [
    ("train --out out", "--src + --multi30k + --task"),
    ("train --out out --task copy --multi30k folder", "one of + --task"),
    ("train --out out --src src.txt", "--src needs --tgt"),
    ("train --out out --src src.txt --tgt tgt.txt", "needs --valid-src"),
    (TRAIN.replace("--src src.txt", "--src missing.txt"), "missing.txt: no such file"),
    (TRAIN.replace("--src src.txt", "--src folder"), "folder + file"),
    (TRAIN.replace("--tgt tgt.txt", "--tgt empty.txt"), "src.txt has 9 lines + empty.txt has 0"),
    (TRAIN.replace("--tgt tgt.txt", "--tgt short.txt"), "src.txt has 9 lines + short.txt has 7"),
    (TRAIN.replace("--valid-tgt tgt.txt", "--valid-tgt short.txt"), "src.txt has 9 lines + short.txt has 7"),
    (TRAIN.replace("src.txt", "empty.txt").replace("tgt.txt", "empty.txt"), "empty.txt: no line with text"),
    (TRAIN.replace("--tgt tgt.txt", "--tgt blank.txt"), "no line with text on both sides"),
    (TRAIN.replace("--src src.txt", "--src latin1.txt"), "latin1.txt:6: not UTF-8 + iconv"),
    (TRAIN.replace("--src src.txt", "--src cut.gz"), "cut.gz: cannot be read"),
    (TRAIN.replace("--src src.txt", "--src plain.gz"), "plain.gz: cannot be read"),
    (TRAIN.replace("--src src.txt", "--src garbage.gz"), "garbage.gz: cannot be read"),
    ("train --out out --multi30k folder", "folder/train.en + no such file"),
    ("train --out out --multi30k missing", "missing/train.en + no such file"),
    ("train --out out --multi30k folder --pair ende", "--pair ende + en-de"),
    (f"{TRAIN} --tokenizer words --pair ende", "--pair ende + en-de"),
    (f"{TRAIN} --tokenizer words --pair qq-qq", "language 'qq'"),
    (f"{TRAIN} --vocab-size 8000", "--vocab-size 8000 does not fit the training text"),
    (f"{TRAIN} --vocab-size 6", "--vocab-size 6 does not fit the training text"),
    (f"{TRAIN} --vocab-size 4", "--vocab-size 4 + special tokens"),
    (f"{TRAIN} --set train.max_tokens=1", "longer than 1 tokens + train.max_tokens"),
    (f"{TRAIN} --set model.max_positions=1", "longer than 1 tokens + model.max_positions"),
]

BAD_SETTINGS = [
    ("train --out out --task numbres", "unknown task 'numbres' + did you mean 'numbers'?"),
    (f"{TRAIN} --preset tinny", "unknown preset 'tinny' + did you mean 'tiny'?"),
    (f"{TRAIN} --tokenizer wrods", "unknown tokenizer 'wrods' + did you mean 'words'?"),
    (f"{TRAIN} --set model.heads=3", "model.heads=3 does not divide model.d_model=16 + 1, 2, 4, 8, 16"),
    (f"{TRAIN} --set model.heads=0", "heads=0: must be at least 1"),
    (f"{TRAIN} --set model.d_modle=64", "unknown key + 'd_modle' + did you mean 'd_model'?"),
    (f"{TRAIN} --set trian.lr=1", "unknown section 'trian' + did you mean 'train'?"),
    (f"{TRAIN} --set d_model=64", "--set d_model=64: write model.KEY=VALUE"),
    (f"{TRAIN} --set model.d_model", "--set model.d_model: write model.KEY=VALUE"),
    (f"{TRAIN} --set model.d_model=wide", "model.d_model=wide: must be a whole number"),
    (f"{TRAIN} --set model.d_model=6_4", "model.d_model=6_4: must be a whole number"),
    (f"{TRAIN} --set model.dropout=some", "model.dropout=some: must be a number"),
    (f"{TRAIN} --set model.dropout=1", "dropout + less than 1"),
    (f"{TRAIN} --set model.final_norm=maybe", "final_norm=maybe: must be true or false"),
    (f"{TRAIN} --set model.norm_position=pots", "'pots' + did you mean 'post'?"),
    (f"{TRAIN} --set model.src_vocab=20 --set model.tgt_vocab=20", "model.src_vocab=20 is smaller than + 30"),
    (f"{TRAIN} --set model.src_vocab=64", "share_embeddings=all needs equal vocabularies"),
    (f"{TRAIN} --set train.lr=0", "lr=0 + above 0"),
    (f"{TRAIN} --set train.lr=nan", "lr=nan"),
    (f"{TRAIN} --set train.lr=inf", "lr=inf"),
    (f"{TRAIN} --updates 0", "updates=0: must be at least 1"),
    (f"{TRAIN} --batch-tokens 0", "batch_tokens=0: must be at least 1"),
    (f"{TRAIN} --seed -1", "seed"),
    (f"{TRAIN} --seed 99999999999999999999", "seed"),
    (f"{TRAIN} --config missing.toml", "missing.toml + No such file"),
    (f"{TRAIN} --config broken.toml", "broken.toml + line 2"),
    (f"{TRAIN} --config section.toml", "section of section.toml 'modle' + did you mean 'model'?"),
    (f"{TRAIN} --config key.toml", "'warmpu' + did you mean 'warmup'?"),
    (f"{TRAIN} --config kind.toml", "max_positions='wide' + int"),
    (f"{TRAIN} --config flat.toml", "flat.toml + model"),
    (f"{TRAIN} --config latin1.toml", "latin1.toml + utf-8"),
    ("init --out out --preset hugh", "unknown preset 'hugh' + valid: base, big, small, tiny"),
    ("init --out out --preset tiny --set model.heads=3", "model.heads=3 does not divide"),
    ("init --out out --preset tiny --vocab-size 60 --set model.src_vocab=50 --set model.tgt_vocab=50", "src_vocab=50"),
    ("init --out out --preset tiny --vocab-size 60 --seed 99999999999999999999", "seed"),
    ("export good --out out --recipe fp23", "unknown recipe 'fp23' + did you mean 'fp32'?"),
    ("export good --out out --recipe broken.toml", "broken.toml + line 2"),
]

BAD_FOLDERS = [
    ("init --out good --preset tiny", "good holds a checkpoint already + --force"),
    (f"train --out good {FILES}", "good holds checkpoint.json, but nothing to continue from: add --force"),
    (f"train --out state {FILES}", "state holds a run already + --resume + --force"),
    ("train --out good --resume", "good has nothing saved to continue from: use --force in place of --resume"),
    ("train --out missing --resume", "missing has nothing saved to continue from: leave out --resume"),
    ("train --out older --resume", "older was saved by an older tformer + start over with --force"),
    ("train --out state --resume", "state/train/state.json is damaged"),
    ("export good --out folder", "folder exists already + --force"),
    ("export good --out folder --force", "folder is not a bundle"),
    ("export good --out src.txt --force", "src.txt is not a bundle"),
    ("init --out src.txt/below --preset tiny --vocab-size 60", "src.txt/below + Not a directory"),
    ("init --out src.txt --preset tiny --vocab-size 60", "src.txt + directory"),
    (TRAIN.replace("--out out", "--out src.txt/below"), "src.txt/below + Not a directory"),
    ("export good --out src.txt/below", "src.txt + choose another folder"),
]

BAD_BUNDLES = [
    ("translate good", "good is not a bundle"),
    (
        "translate missing --beams 3",
        "missing is not a bundle: there is no such folder; a bundle is a folder",
    ),
    ("score good --src src.txt --tgt tgt.txt", "good is not a bundle"),
    ("score good --src src.txt --tgt short.txt", "src.txt has 9 lines, short.txt 7: they must be parallel"),
    ("score good --src missing.txt --tgt tgt.txt", "missing.txt: no such file"),
    ("score good --src src.txt --tgt latin1.txt", "latin1.txt:6: not UTF-8 + iconv"),
    ("score good --src cut.gz --tgt tgt.txt", "cut.gz: cannot be read"),
]

BAD_CHECKPOINTS = [
    (
        "missing",
        "missing is not a checkpoint: there is no such folder; a checkpoint is a run folder, which tformer train",
    ),
    ("src.txt", "src.txt is not a checkpoint: it is a file; a checkpoint is a run folder"),
    ("headless", "headless is not a checkpoint: it has no checkpoint.json"),
    ("nonsense", "nonsense/checkpoint.json is damaged"),
    ("list", "list/checkpoint.json is damaged"),
    ("foreign", "foreign/checkpoint.json describes a 'other-checkpoint'"),
    ("newer", "newer/checkpoint.json has format version 99 + reads up to 3"),
    ("hashless", "hashless/checkpoint.json is damaged + 'files'"),
    ("modelless", "modelless/checkpoint.json is damaged + 'model'"),
    ("retouched", "retouched/checkpoint.json was edited or damaged: it does not match its own SHA-256"),
    ("lost", f"lost is incomplete: {WEIGHTS} is missing"),
    ("truncated", f"truncated is damaged: {WEIGHTS} does not match its SHA-256"),
    ("edited", f"edited is damaged: {WEIGHTS} does not match its SHA-256"),
    ("words", "words is damaged: tokenizer.words does not match its SHA-256"),
]

DEEPER = [
    ("export heads --out out", "model.heads=5 does not divide"),
    ("export rehashed --out out", f"rehashed/{WEIGHTS} cannot be read"),
    ("export incomplete --out out", "incomplete + does not fit its config + 'encoder_norm.weight'"),
]

ALL = [
    *BAD_TEXT,
    *BAD_SETTINGS,
    *BAD_FOLDERS,
    *BAD_BUNDLES,
    *((f"inspect {name}", words) for name, words in BAD_CHECKPOINTS),
    *((f"export {name} --out out", words) for name, words in BAD_CHECKPOINTS),
    *DEEPER,
]


@pytest.mark.parametrize(("command", "words"), ALL, ids=[f"{command.split()[0]}: {words}" for command, words in ALL])
def test_one_line_and_exit_code_1(
    command: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = tformer(command, monkeypatch)
    out, err = capfd.readouterr()
    assert code == 1
    assert out == ""
    assert_one_line(err, words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --out out --task copy --updats 3", "--updats"),
        ("train --task copy", "--out"),
        ("train --out out --task copy --updates many", "--updates"),
        ("init --out out --vocab-size 4", "--vocab-size"),
        ("inspect", "Missing argument"),
        ("translate", "Missing argument"),
        ("translate good --beams many", "--beams"),
        ("translate good --batch-tokens -1", "--batch-tokens"),
        ("score good --src src.txt", "--tgt"),
        ("exprot good --out out", "exprot"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    command: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tformer(command, monkeypatch) == 2
    err = capfd.readouterr().err
    assert words in err and "Traceback" not in err


def process(command: str, file_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, which may be unable to write files of more than `file_bytes`."""

    def limit() -> None:
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    return subprocess.run(
        [sys.executable, "-m", "tformer_deploy", *shlex.split(command)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_real_process() -> None:
    done = process("init --out out --set model.d_modle=64")
    assert done.returncode == 1
    assert_one_line(done.stderr, "unknown key of [model] 'd_modle' + did you mean 'd_model'?")


def test_debug_shows_the_trace() -> None:
    done = process("--debug inspect missing")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert "ArtifactError: missing is not a checkpoint" in done.stderr.splitlines()[-1]


def test_full_disk_leaves_no_checkpoint(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    out = tmp_path / "out"
    done = process(f"init --preset tiny --vocab-size 60 --out {out}", file_bytes=20_000)
    assert done.returncode == 1, done.stderr
    assert_one_line(done.stderr, "File too large")
    assert [path for path in out.rglob("*") if path.is_file()] == []


@pytest.mark.long
def test_disk_that_fills_up_in_training_keeps_the_last_save(tmp_path: Path) -> None:
    """The weights (130 kB) fit under the limit, the training state, which is three times as large, does not."""
    done = process(f"{TRAIN} --set model.d_model=48 --out {tmp_path}/out", file_bytes=250_000)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "File too large" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert open_checkpoint(tmp_path / "out").weights.stat().st_size > 100_000
    assert not any((tmp_path / "out/train").iterdir())
