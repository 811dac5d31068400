"""Files that are whole or absent, headers, hashes, and checkpoints that have been harmed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tformer_deploy.base import files, headers
from tformer_deploy.base.errors import ArtifactError, ConfigError, DataError, TformerError
from tformer_deploy.base.files import (
    atomic_directory,
    atomic_file,
    check_writable,
    hold,
    output_file,
    sha256,
    write_json,
)
from tformer_deploy.base.headers import digest, member, read_bytes, read_header, verify
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words
from tformer_deploy.model.checkpoint import (
    HEADER,
    load_tensors,
    model_tensors,
    open_checkpoint,
    save_checkpoint,
    save_tensors,
)
from tformer_deploy.model.config import ModelConfig
from tformer_deploy.model.network import Transformer
from tformer_deploy.translate.opening import TranslatorOptions, open_translator

CONFIG = ModelConfig(
    12, 12, d_model=8, d_ff=12, heads=2, encoder_layers=1, decoder_layers=1, max_positions=16, final_norm=False
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# atomic_file


def test_atomic_file_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.txt"
    for content in ("old", "new"):
        with atomic_file(path) as temporary:
            temporary.write_text(content)
            assert temporary.parent == path.parent and (content == "old") is not path.exists()
        assert path.read_text() == content
    assert names(path.parent) == ["file.txt"]


@pytest.mark.parametrize("before", ["old", None])
def test_atomic_file_keeps_the_old_one_on_failure(before: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    if before:
        path.write_text(before)
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == (["file.txt"] if before else [])
    assert not before or path.read_text() == before


def test_write_json_is_readable_by_people(tmp_path: Path) -> None:
    write_json(tmp_path / "value.json", {"name": "Übersetzung", "sizes": [1, 2]})
    text = (tmp_path / "value.json").read_text(encoding="utf-8")
    assert "Übersetzung" in text and text.endswith("}\n") and text.count("\n") > 4
    assert json.loads(text) == {"name": "Übersetzung", "sizes": [1, 2]}


# atomic_directory


def make_old(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("old")


def test_atomic_directory_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "bundle"
    with atomic_directory(path, force=False) as temporary:
        (temporary / "deep").mkdir()
        (temporary / "deep" / "file").write_text("new")
        assert not path.exists()
    assert (path / "deep" / "file").read_text() == "new"
    assert names(path.parent) == ["bundle"]


def test_atomic_directory_needs_force_to_replace(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    make_old(path)
    with pytest.raises(ArtifactError, match="bundle exists already: choose another folder or add --force"):
        atomic_directory(path, force=False).__enter__()
    assert (path / "file").read_text() == "old"
    with atomic_directory(path, force=True) as temporary:
        (temporary / "other").write_text("new")
        assert (path / "file").read_text() == "old"
    assert names(path) == ["other"] and names(tmp_path) == ["bundle"]


@pytest.mark.parametrize("before", [True, False])
def test_atomic_directory_leaves_nothing_behind_on_failure(before: bool, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    if before:
        make_old(path)
    with pytest.raises(RuntimeError), atomic_directory(path, force=True) as temporary:
        (temporary / "file").write_text("half")
        raise RuntimeError
    assert names(tmp_path) == (["bundle"] if before else [])
    assert not before or (path / "file").read_text() == "old"


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from tformer_deploy.base import files

moment, move = sys.argv[2], files.rename

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def deadly_rename(*arguments):
    if moment == "before the move":
        die()
    move(*arguments)
    if moment == "after the move":
        die()

files.rename = deadly_rename
with files.atomic_directory(Path(sys.argv[1]), force=True) as temporary:
    (temporary / "file").write_text("ne")
    if moment == "while writing":
        die()
    (temporary / "file").write_text("new")
"""


@pytest.mark.parametrize("before", [None, "old"])
@pytest.mark.parametrize("moment", ["while writing", "before the move", "after the move"])
def test_a_killed_process_leaves_the_old_directory_or_the_new_one(
    before: str | None, moment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "bundle"
    if before:
        make_old(path)
    child = subprocess.run([sys.executable, "-c", KILLED, str(path), moment], timeout=60, check=False)
    assert child.returncode == -signal.SIGKILL
    expected = "new" if moment == "after the move" else before
    assert path.exists() == bool(expected)
    assert not expected or (names(path) == ["file"] and (path / "file").read_text() == expected)
    with atomic_directory(path, force=True) as temporary:  # the next one removes what is left, and says so
        (temporary / "file").write_text("again")
    assert names(tmp_path) == ["bundle"] and (path / "file").read_text() == "again"
    left = before or moment != "after the move"
    assert [record.message.split(" removed: ")[-1] for record in caplog.records] == [
        "a process that was killed left it"
    ] * bool(left)


def test_what_others_work_on_or_own_is_no_leftover(tmp_path: Path) -> None:
    mine = [tmp_path / name for name in (".bundle.tmp", ".bundle.20240101.tmp", ".other.12345678.tformer.tmp")]
    for path in mine:
        path.write_text("mine")
    with atomic_directory(tmp_path / "bundle", force=False) as first:
        with pytest.raises(ArtifactError, match=r"another process is making .*bundle: wait until it has ended"):
            atomic_directory(tmp_path / "bundle", force=False).__enter__()
        assert first.is_dir()
    with atomic_file(tmp_path / "page.html") as first, atomic_file(tmp_path / "page.html") as second:
        assert first.is_file() and second.is_file() and first != second
    assert all(path.read_text() == "mine" for path in mine)


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_meanwhile_is_not_replaced(force: bool, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    with (
        pytest.raises(ArtifactError, match="is not a bundle" if force else "exists already"),
        atomic_directory(path, force, "bundle", lambda folder: (folder / "manifest.json").is_file()),
    ):
        make_old(path)
    assert names(tmp_path) == ["bundle"] and (path / "file").read_text() == "old"


def test_what_appears_in_the_last_moment_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, move = tmp_path / "bundle", files.rename

    def late(*arguments: Any) -> None:
        path.mkdir()  # an empty folder, which an ordinary rename would replace
        move(*arguments)

    monkeypatch.setattr(files, "rename", late)
    with pytest.raises(ArtifactError, match="appeared meanwhile and stays"), atomic_directory(path, force=False):
        pass
    assert names(tmp_path) == ["bundle"] and names(path) == []


@pytest.mark.parametrize("exists", [False, True])
def test_file_systems_that_cannot_exchange(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(files, "rename", refuse)
    path = tmp_path / "bundle"
    if exists:
        make_old(path)
        with pytest.raises(ArtifactError, match="on this file system: remove it first"), atomic_directory(path, True):
            pass
        assert (path / "file").read_text() == "old"
    else:
        with atomic_directory(path, force=True) as temporary:
            (temporary / "file").write_text("new")
        assert (path / "file").read_text() == "new"
    assert names(tmp_path) == ["bundle"]


def test_a_folder_is_changed_by_one_at_a_time(tmp_path: Path) -> None:
    with hold(tmp_path), pytest.raises(ArtifactError, match="is being changed by another process: wait"):
        hold(tmp_path).__enter__()
    with hold(tmp_path):
        pass
    make_old(tmp_path / "bundle")
    with hold(tmp_path / "bundle"), pytest.raises(ArtifactError, match="is being changed by another process"):
        atomic_directory(tmp_path / "bundle", force=True).__enter__()
    assert names(tmp_path) == ["bundle"]


def test_file_systems_without_locks_are_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike other errors of a lock, which leave nothing behind."""
    code = errno.ENOLCK

    def refuse(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    make_old(tmp_path / "bundle")
    for code in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
        write_json(tmp_path / "file", code)
        assert json.loads((tmp_path / "file").read_text()) == code
        with atomic_directory(tmp_path / "bundle", force=True) as temporary:
            (temporary / "file").write_text(str(code))
        assert (tmp_path / "bundle/file").read_text() == str(code) and names(tmp_path) == ["bundle", "file"]
    code, descriptors = errno.EIO, names(Path("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output error"):
        write_json(tmp_path / "file", 1)
    with pytest.raises(OSError, match="Input/output error"):
        atomic_directory(tmp_path / "new", force=False).__enter__()
    assert names(tmp_path) == ["bundle", "file"] and names(Path("/proc/self/fd")) == descriptors


# Links, devices and pipes


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for name, target in (("link", "real/file"), ("dangling", "real/new")):
        (tmp_path / name).symlink_to(target)
        with output_file(tmp_path / name) as temporary:
            temporary.write_text(name)
        assert (tmp_path / name).is_symlink() and (tmp_path / target).read_text() == name
    make_old(tmp_path / "bundle")
    (tmp_path / "current").symlink_to("bundle")
    with atomic_directory(tmp_path / "current", force=True) as temporary:
        (temporary / "file").write_text("new")
    assert (tmp_path / "current").is_symlink() and (tmp_path / "bundle/file").read_text() == "new"
    assert names(tmp_path) == ["bundle", "current", "dangling", "link", "real"]


def test_a_device_and_a_pipe_are_written_to(tmp_path: Path) -> None:
    with output_file(Path("/dev/null")) as temporary:
        temporary.write_text("nothing")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="No space left"), output_file(Path("/dev/full")) as temporary:
        temporary.write_text("too much")
    assert Path("/dev/full").is_char_device()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with output_file(tmp_path / "pipe") as temporary:
        temporary.write_text("through the pipe")
    assert os.read(reader, 100) == b"through the pipe" and names(tmp_path) == ["pipe"]
    os.close(reader)
    with pytest.raises(IsADirectoryError), output_file(tmp_path):
        pass


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")
def test_a_file_below_dev_is_replaced() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for content in ("first", "second"):
            with output_file(Path(folder) / "file") as temporary:
                temporary.write_text(content)
        assert (Path(folder) / "file").read_text() == "second"


def test_errors_within_a_new_directory_name_the_final_path(tmp_path: Path) -> None:
    error = pytest.raises(DataError, match=f"^{re.escape(str(tmp_path))}/new/file is damaged$")
    with error, atomic_directory(tmp_path / "new", force=False) as temporary:
        raise DataError(f"{temporary}/file is damaged")


def test_paths_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    for use in (hold, lambda path: atomic_directory(path, force=True)):
        with pytest.raises(ConfigError, match=r"caf\\xe9 is not UTF-8, .* rename the folder"), use(folder):
            pass
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_header(folder, "thing.json", "thing", 1)


def test_results_that_cannot_be_written_are_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "dangling").symlink_to("nowhere/file")
    (tmp_path / "link").symlink_to("new")
    for path in (tmp_path / "file", tmp_path / "new", tmp_path / "link", Path("/dev/null")):
        check_writable(path)
    for path in (tmp_path, tmp_path / "file/below", tmp_path / "nowhere/file", tmp_path / "dangling"):
        with pytest.raises(ConfigError, match="cannot be written: name a file in a folder that exists"):
            check_writable(path)


def test_links_in_a_folder_that_is_changed_are_refused(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    make_old(folder)
    make_old(outside)
    with atomic_file(folder / "file") as temporary:
        temporary.write_text("new")
    (folder / "deep").mkdir()
    for name, make in (("link", lambda path: path.symlink_to(outside)), ("deep/pipe", os.mkfifo)):
        make(folder / name)
        with pytest.raises(ArtifactError, match=f"{name} is a link, a pipe or a device"), hold(folder):
            pass
        (folder / name).unlink()
    (folder / "link").symlink_to(outside / "file")
    with atomic_file(folder / "link") as temporary:
        temporary.write_text("instead of the link")
    assert not (folder / "link").is_symlink() and (outside / "file").read_text() == "old"


def test_open_files_are_written_to(tmp_path: Path) -> None:
    """As `--html /dev/stdout >> log` asks."""
    code = "from tformer_deploy.base.files import *; print('first'); write_output(Path('/dev/stdout'), 'page')"
    (tmp_path / "log").write_text("before\n")
    with (tmp_path / "log").open("a") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True, timeout=60)
    assert (tmp_path / "log").read_text() == "before\nfirst\npage"


@pytest.mark.parametrize(
    ("mask", "before", "expected"), [(0o077, None, 0o600), (0o022, None, 0o644), (0o022, 0o600, 0o600)]
)
def test_permissions_are_kept(mask: int, before: int | None, expected: int, tmp_path: Path) -> None:
    path, old = tmp_path / "file", os.umask(mask)
    try:
        if before:
            path.write_text("old")
            path.chmod(before)
        with atomic_file(path) as temporary:
            temporary.write_text("new")
    finally:
        os.umask(old)
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == expected


@pytest.mark.parametrize(("mask", "expected"), [(0o077, 0o700), (0o022, 0o755), (0o002, 0o775)])
def test_a_folder_has_the_permissions_of_new_ones(mask: int, expected: int, tmp_path: Path) -> None:
    old = os.umask(mask)
    try:
        with atomic_directory(tmp_path / "folder", force=False):
            pass
    finally:
        os.umask(old)
    assert (tmp_path / "folder").stat().st_mode & 0o777 == expected


# What a header may name


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "link", "folder/link"])
def test_files_outside_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to("../outside")
    (inside / "folder").symlink_to(tmp_path)
    (tmp_path / "link").write_text("mine")
    with pytest.raises(ArtifactError, match=r"lies outside .*inside"):
        member(inside, name)


def test_only_regular_files_of_a_sane_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("12345")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path, "link", 5) == b"12345"
    with pytest.raises(ArtifactError, match="has 5 bytes, more than 4"):
        read_bytes(tmp_path, "file", 4)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ArtifactError, match="is no regular file"):
            read_bytes(tmp_path, name, 5)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def test_pointers_of_git_lfs_are_named(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text(POINTER)
    with pytest.raises(ArtifactError, match=r"weights is a pointer of Git LFS, not the file: run git lfs pull where"):
        read_bytes(tmp_path, "weights", 1000)
    (tmp_path / "weights").write_text(POINTER + "x" * 1000)  # no pointer is so long
    assert len(read_bytes(tmp_path, "weights", 2000)) > 1000


def linked(bundle: Path, root: Path, kind: str) -> Path:
    """A bundle as the cache of Hugging Face has it, or a volume of Kubernetes."""
    store, folder = ("blobs", "snapshots/hash") if kind == "hub" else ("mount/..2026_11", "mount")
    (root / folder).mkdir(parents=True)
    shutil.copytree(bundle, root / store)
    (root / "mount/..data").symlink_to("..2026_11") if kind == "volume" else None
    target = "../../blobs" if kind == "hub" else "..data"
    for path in bundle.iterdir():
        (root / folder / path.name).symlink_to(f"{target}/{path.name}")
    return root / folder


def test_a_bundle_of_links(bundle: Path, tmp_path: Path) -> None:
    """Those that stay inside are followed, weights that a graph names among them; others are refused with the way."""
    expected = outputs_of(bundle)
    assert outputs_of(linked(bundle, tmp_path, "volume")) == expected
    (tmp_path / "current").symlink_to("mount")
    assert outputs_of(tmp_path / "current") == expected
    snapshot = linked(bundle, tmp_path, "hub")
    with pytest.raises(
        ArtifactError, match=r"manifest.json lies outside .*, links as the files that they lead to \(cp -rL\)"
    ):
        open_bundle(snapshot)
    subprocess.run(["cp", "-rL", snapshot, tmp_path / "copied"], check=True)
    assert outputs_of(tmp_path / "copied") == expected


def outputs_of(folder: Path) -> list[list[int]]:
    with open_translator(TranslatorOptions(folder, "ort", threads=1)) as translator:
        return [result.ids for result in translator.translate(["w5 w6", "w7"])]


# Headers and hashes


def test_verify_names_the_first_file_that_is_missing_or_differs(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-4, "abc"
    assert sha256(tmp_path / "a") == known
    verify(tmp_path, {"a": known}, "bundle")
    with pytest.raises(ArtifactError, match="incomplete: b is missing"):
        verify(tmp_path, {"a": known, "b": known}, "bundle")
    (tmp_path / "a").write_bytes(b"abd")
    with pytest.raises(ArtifactError, match="damaged: a does not match its SHA-256"):
        verify(tmp_path, {"a": known}, "bundle")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": "tformer-bundle", "version": 3}', "format version 3, this tformer reads up to 2: update it"),
        (b'{"format": "tformer-bundle", "version": "2"}', "format version 2"),
        (b'{"format": "tformer-checkpoint", "version": 1}', "describes a 'tformer-checkpoint', not a bundle"),
        (b'{"format": "tformer-bundle"}', "damaged .*version.*: make the bundle again"),
        (b'{"format": "tformer-bundle", "vers', "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[1, 2]", "damaged"),
        (b"", "damaged"),
    ],
    ids=repr,
)
def test_headers_that_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=message):
        read_header(tmp_path, "manifest.json", "bundle", 2)


def test_older_and_equal_versions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "_schema", lambda kind: lambda value: value)  # things have none
    for version in (1, 2):
        header = {"format": "tformer-thing", "version": version, "more": [1]}
        write_json(tmp_path / "thing.json", header)
        assert read_header(tmp_path, "thing.json", "thing", 2) == header


# Checkpoints


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of random weights."""
    words = Words([*SPECIALS, *"abcdefgh"], None)
    weights = tmp_path / "run" / "weights" / "step-7.safetensors"
    save_tensors(weights, model_tensors(Transformer(CONFIG).init_weights(1)))
    save_checkpoint(tmp_path / "run", CONFIG, Tokenizers(words, words), weights, {"updates": 7})
    return tmp_path / "run"


def edit_header(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header = json.loads((run / HEADER).read_text(encoding="utf-8"))
    change(header)
    header["sha256"] = digest(header)
    (run / HEADER).write_text(json.dumps(header), encoding="utf-8")


def test_checkpoint_round_trip(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert checkpoint.config == CONFIG and checkpoint.header["training"] == {"updates": 7}
    assert checkpoint.tokenizers.source_ids("a h z") == [4, 11, 0, 3]
    assert checkpoint.weights_sha256 == sha256(checkpoint.weights)
    model, original = checkpoint.load_model(), Transformer(CONFIG).init_weights(1)
    assert not model.training
    assert model.output.weight is model.src_embedding.weight
    for (name, loaded), expected in zip(model.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(loaded, expected), name


def test_shared_weights_are_saved_once(saved: Path) -> None:
    tensors = load_tensors(open_checkpoint(saved).weights)
    assert not {"output.weight", "src_embedding.weight"} & tensors.keys()
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(
        p.numel() for p in Transformer(CONFIG).parameters()
    )


@pytest.mark.parametrize("file", ["weights/step-7.safetensors", "tokenizer.words"])
@pytest.mark.parametrize("harm", ["truncated", "edited", "missing"])
def test_harmed_files_are_noticed(file: str, harm: str, saved: Path) -> None:
    path = saved / file
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-5] if harm == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=f"{file} is missing" if harm == "missing" else f"damaged: {file}"):
        open_checkpoint(saved)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    for folder, why in ((tmp_path, f"it has no {HEADER}"), (tmp_path / "nowhere", "there is no such folder")):
        with pytest.raises(ArtifactError, match=f"is not a checkpoint: {why}; a checkpoint is a run folder"):
            open_checkpoint(folder)


def test_newer_version(saved: Path) -> None:
    edit_header(saved, lambda header: header.update(version=4))
    with pytest.raises(ArtifactError, match="format version 4, this tformer reads up to 3: update it"):
        open_checkpoint(saved)


def test_truncated_header(saved: Path) -> None:
    (saved / HEADER).write_bytes((saved / HEADER).read_bytes()[:-20])
    with pytest.raises(ArtifactError, match="damaged"):
        open_checkpoint(saved)


@pytest.mark.parametrize("key", ["model", "tokenizer", "weights", "files"])
def test_header_without_a_key(key: str, saved: Path) -> None:
    edit_header(saved, lambda header: header.pop(key))
    with pytest.raises(ArtifactError, match=key):
        open_checkpoint(saved)


@pytest.mark.parametrize("key", ["model", "tokenizer", "weights", "files"])
def test_header_with_a_value_of_the_wrong_kind(key: str, saved: Path) -> None:
    edit_header(saved, lambda header: header.update({key: None}))
    with pytest.raises(TformerError, match=f"{key} must be"):
        open_checkpoint(saved)


def test_every_file_in_use_must_have_a_hash(saved: Path) -> None:
    edit_header(saved, lambda header: header["files"].pop(header["weights"]))
    with pytest.raises(ArtifactError, match="no hash of weights/"):
        open_checkpoint(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_ff": 16}, "does not fit its config: 'encoder.0.ff.up.weight' is .*12, 8.*expected .*16, 8"),
        ({"decoder_layers": 2}, r"missing or unknown tensor 'decoder\.1\."),
        ({"output_bias": True}, r"missing or unknown tensor 'output\.bias'"),
    ],
    ids=str,
)
def test_config_that_does_not_fit_the_weights(change: dict[str, Any], message: str, saved: Path) -> None:
    edit_header(saved, lambda header: header["model"].update(change))
    with pytest.raises(ArtifactError, match=message):
        open_checkpoint(saved).load_model()


def test_unknown_model_field_is_named(saved: Path) -> None:
    edit_header(saved, lambda header: header["model"].update(experts=4))
    with pytest.raises(TformerError, match="experts"):
        open_checkpoint(saved)


@pytest.mark.parametrize("content", [b"", b"x" * 100, None], ids=["empty", "garbage", "truncated"])
def test_tensors_that_cannot_be_read(content: bytes | None, saved: Path) -> None:
    path = saved / "weights" / "step-7.safetensors"
    path.write_bytes(path.read_bytes()[:-5] if content is None else content)
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_tensors(path)
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_tensors(saved / "nowhere.safetensors")
