"""`tformer import` of tutorials' checkpoints: the numbers and tokens of plain code with the tutorial's names."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tformer_deploy
from tformer_deploy.base.errors import ArtifactError, ConfigError, TformerError
from tformer_deploy.export.checked import export_checked
from tformer_deploy.importers import annotated as annotated_format
from tformer_deploy.importers import torch as torch_format
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.compare import compare
from tformer_deploy.importers.run import compare_again, import_checkpoint, recognised
from tformer_deploy.importers.torch import TorchOriginal
from tformer_deploy.importers.vocabularies import read_entries
from tformer_deploy.model.checkpoint import open_checkpoint

from .command import failed_line, run_here
from .import_cases import CASES, LIMIT, Case, annotated, imported, multi30k, of_torch, seq2seq, write_words
from .params import long_but


@pytest.mark.parametrize("case", long_but(CASES, "annotated"))
def test_numbers_and_tokens_are_those_of_the_tutorials_code(case: Case, tmp_path: Path) -> None:
    run, plain = imported(case, tmp_path / "case")
    checkpoint = open_checkpoint(run)
    model = checkpoint.load_model()
    rng = np.random.default_rng(1)
    sources = [[2, *rng.integers(4, 40, n).tolist(), 3] for n in (1, 4, 9, 16)]
    src = torch.ones(len(sources), 18, dtype=torch.long)
    for row, source in zip(src, sources, strict=True):
        row[: len(source)] = torch.tensor(source)
    lengths = torch.tensor([len(source) for source in sources])
    tgt = torch.from_numpy(rng.integers(4, 44, (len(sources), 12)))
    tgt[:, 0] = 2
    with torch.inference_mode():
        real = torch.arange(18) < lengths[:, None]
        assert (model.encode(src, lengths)[real] - plain.memory(src, lengths)[real]).abs().max() < LIMIT
        ours, theirs = model(src, lengths, tgt).log_softmax(-1), plain.log_probs(src, lengths, tgt)
    assert (ours - theirs).abs().max() < LIMIT
    assert theirs.std() > 0.5, "flat log-probabilities compare nothing"
    lines = [" ".join(f"w{i}" for i in source[1:-1]) for source in sources]
    report = export_checked(run, tmp_path / "bundle")
    assert report.passed
    with tformer_deploy.load(tmp_path / "bundle", max_tokens=12) as translator:
        assert [translator.tokenizers.source_ids(line) for line in lines] == sources
        found = [result.ids for result in translator.translate(lines)]
    assert found == [plain.greedy(source, 2, 3, 12) for source in sources]
    assert len({tuple(ids) for ids in found}) > 2, "outputs must differ"


def test_an_original_without_positions_and_with_another_activation(tmp_path: Path) -> None:
    """Also where the file has a table: it is left out of both."""
    run, _ = imported(CASES["torch, no positions, silu"], tmp_path / "none")
    assert open_checkpoint(run).config.positions == "none"
    stored, plain = of_torch(False, False, True, True)
    run, _ = imported(Case("torch", lambda: (stored, plain), {"model": {"positions": "none"}}), tmp_path / "table")
    assert open_checkpoint(run).config.positions == "none"


@pytest.mark.parametrize(
    ("case", "positions", "assumed"),
    [
        ("torch, no positions, silu", {}, True),
        ("torch, no positions, silu", {"positions": "none"}, False),
        ("annotated, other norms and embeddings", {}, True),
        ("annotated, other norms and embeddings", {"positions": "sinusoidal"}, False),
        ("annotated", {}, False),
    ],
)
def test_positions_that_no_file_states_are_noted(
    case: str, positions: dict[str, str], assumed: bool, tmp_path: Path
) -> None:
    torch.save(CASES[case].make()[0], tmp_path / "model.pt")
    words = {"src_vocab": write_words(tmp_path / "src", 40), "tgt_vocab": write_words(tmp_path / "tgt", 44)}
    read = torch_format.read if case.startswith("torch") else annotated_format.read
    notes = read(tmp_path / "model.pt", ImportOptions(heads=4, **words, model=positions)).notes
    assert any("sinusoidal assumed; --set model.positions=none" in note for note in notes) is assumed


def test_what_a_changed_original_raises_is_said_in_a_line(tmp_path: Path) -> None:
    run, _ = imported(CASES["pytorch-seq2seq"], tmp_path)
    state = torch.load(tmp_path / "model.pt")
    torch.save({**state, "encoder.pos_embedding.weight": torch.tensor(1.0)}, tmp_path / "model.pt")
    with pytest.raises(ArtifactError, match=r"model.pt is not as pytorch-seq2seq is known \(IndexError: .*\): copy it"):
        compare_again(open_checkpoint(run))


@pytest.mark.long
def test_a_comparison_that_fails_does_not_lose_the_report(tmp_path: Path) -> None:
    run, _ = imported(CASES["torch, no positions, silu"], tmp_path)
    bundle, page = tmp_path / "bundle", tmp_path / "check.html"
    export_checked(run, bundle)
    check = "check", bundle, "--original", "--html", page, "--json"
    assert json.loads(run_here(*check).stdout)["original"]["failures"] == []
    page.unlink()
    torch.save({}, tmp_path / "model.pt")
    done = run_here(*check)
    assert "model.pt" in failed_line(done)
    assert json.loads(done.stdout)["passed"] and page.exists()
    (tmp_path / "model.pt").unlink()
    saved = tmp_path / "reference"  # what is known before the check is said before it
    assert "put it back" in failed_line(run_here(*check, "--save-reference", saved, "--backend", "ort"))
    assert not saved.exists()


def test_the_limit_follows_the_originals_own_rounding(tmp_path: Path) -> None:
    """Large weights: fp32 is further from fp64 than the limit, on both sides. What fp64 shows too is no rounding."""
    state = of_torch(False, False, True, True)[0]
    torch.save({**state, "generator.weight": 50 * state["generator.weight"]}, tmp_path / "model.pt")
    words = {"src_vocab": write_words(tmp_path / "src", 40), "tgt_vocab": write_words(tmp_path / "tgt", 44)}
    options = ImportOptions(heads=4, **words)
    imported, found = import_checkpoint("torch", tmp_path / "model.pt", tmp_path / "run", options)
    assert LIMIT < found.log_probs <= 10 * found.rounding < 0.02 and "rounded there by up to" in str(found)
    checkpoint, original = open_checkpoint(tmp_path / "run"), imported.original() if imported.original else None
    assert isinstance(original, TorchOriginal) and original.bias is not None
    original.bias[5] += 3 * LIMIT  # one entry alone
    wrong = compare(original, checkpoint.load_model(), checkpoint.tokenizers, {}, [])
    assert wrong.failures[-1] == "log-probabilities differ by 3.0e-04 in fp64 too"
    original.bias[5] += 1000 * LIMIT
    wrong = compare(original, checkpoint.load_model(), checkpoint.tokenizers, {}, [])
    assert [line.split(",")[0] for line in wrong.failures] == [
        "log-probabilities differ by 1.0e-01",
        "log-probabilities differ by 1.0e-01 in fp64 too",
    ]


def test_shared_tables_are_shared(tmp_path: Path) -> None:
    stored, _ = annotated(shared=True)
    torch.save(stored, tmp_path / "model.pt")
    words = write_words(tmp_path / "words", 44)
    import_checkpoint("annotated", tmp_path / "model.pt", tmp_path / "run", ImportOptions(vocab=words, heads=4))
    config = open_checkpoint(tmp_path / "run").config
    assert config.share_embeddings == "all" and config.output_bias and config.positions == "sinusoidal"


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("annotated", "annotated"),
        ("multi30k-tutorial", "multi30k-tutorial"),
        ("pytorch-seq2seq", "pytorch-seq2seq"),
        ("torch, pre=True, gelu=True, biases=True, final=True", "torch"),
    ],
)
def test_formats_are_recognised(case: str, name: str, tmp_path: Path) -> None:
    torch.save(CASES[case].make()[0], tmp_path / "model.pt")
    assert recognised(tmp_path / "model.pt") == name
    parallel = {f"module.{key}": tensor for key, tensor in CASES[case].make()[0].items()}
    torch.save({"epoch": 3, "state_dict": parallel}, tmp_path / "model.pt")
    assert recognised(tmp_path / "model.pt") == name


@pytest.mark.parametrize("ending", [".ckpt", ".bin", ".zip", "", ".safetensors"])
def test_files_are_recognised_by_what_is_in_them(ending: str, tmp_path: Path) -> None:
    """A state dict under other names; safetensors that are called .bin, and what torch saved before it wrote zips."""
    words = {"src_vocab": write_words(tmp_path / "src", 40), "tgt_vocab": write_words(tmp_path / "tgt", 44)}
    state = {name: tensor.contiguous() for name, tensor in seq2seq()[0].items()}
    path = tmp_path / f"model{'.bin' if ending == '.safetensors' else ending}"
    if ending == ".safetensors":
        save_file(state, path)
    else:
        torch.save(
            {"args": Namespace(lr=1), "state_dict": state}, path, _use_new_zipfile_serialization=ending != ".bin"
        )
    assert recognised(path) == "pytorch-seq2seq"
    import_checkpoint("pytorch-seq2seq", path, tmp_path / "run", ImportOptions(heads=4, **words))
    found = open_checkpoint(tmp_path / "run").load_model().output.weight
    assert torch.equal(found, state["decoder.fc_out.weight"])


def test_pipes_of_a_folder_are_named_before_an_original_opens_them(tmp_path: Path) -> None:
    """Also those that we do not read ourselves, and vocabularies. What is not there is no matter."""
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "added_tokens.json")
    for name in ("hf", "ctranslate2"):
        with pytest.raises(ArtifactError, match=r"added_tokens.json is no regular file"):
            import_checkpoint(name, tmp_path, tmp_path / "run")
    with pytest.raises(ArtifactError, match=r"added_tokens.json is no regular file"):
        recognised(tmp_path)
    for words in (tmp_path / "added_tokens.json", Path("/proc/kmsg"), Path("/dev/zero")):
        with pytest.raises(ArtifactError, match=f"{words} is no regular file"):
            read_entries(words)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(seq2seq()[0], tmp_path / "model.pt")
    (tmp_path / "words.json").write_text(json.dumps(write_words(tmp_path / "w", 40).read_text().split()), "utf-8")
    write_words(tmp_path / "tgt", 44)
    files = ["--src-vocab", "words.json", "--tgt-vocab", "tgt", "--heads", "4", "--out", "run"]
    found = run_here("import", "model.pt", *files)
    assert found.returncode == 0, found.stderr
    assert b"run: pytorch-seq2seq" in found.stdout and b"NOT COMPARED" in found.stderr
    again = run_here("import", "pytorch-seq2seq", "model.pt", *files)
    assert again.returncode == 1 and b"exists already" in again.stderr
    forced = run_here("import", "pytorch-seq2seq", "model.pt", *files, "--force", "--json")
    assert json.loads(forced.stdout)["format"] == "pytorch-seq2seq"
    many = run_here("import", "a", "b", "c", "--out", "run")
    assert many.returncode == 1 and b"write [FORMAT] PATH" in many.stderr
    unused = run_here("import", "pytorch-seq2seq", "model.pt", *files, "--force", "--part", "a=b", "--src-lang", "de")
    assert failed_line(unused).startswith(
        "error: --src-lang, --part: not used by format pytorch-seq2seq, which takes --vo"
    )
    nothing = run_here("import", "pytorch-seq2seq", "model.pt", *files, "--force", "--src", "tgt", "--no-compare")
    assert "--src tgt is text to compare with" in failed_line(nothing)


class Evil:
    """Would run a command where it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("evil"),)


def broken(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        stored = dict(seq2seq()[0])
        made = change(stored)
        torch.save(stored if made is None else made, path)

    return write


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", bytes(64 << 20))


def half(path: Path) -> None:
    torch.save(seq2seq()[0], path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + content[-200:])


def nested(times: int) -> bytes:
    """A pickle of a dict whose key is a tuple of the same tuple twice, and so on: to hash it takes 2^times steps."""
    twice = b"".join(b"q%ch%c\x86" % (i + 2, i + 2) for i in range(times))
    return b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01\x85" + twice + b"K\x01s."


def zipped(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3\n")

    return write


def of_marian(path: Path) -> None:
    """As marian-conv writes it: a version, how many tensors, sizes of each, names, shapes, values."""
    names = b"encoder_Wemb\0", b"special:model.yml\0"
    heads = [value for name in names for value in (len(name), 257, 1, 4)]
    path.write_bytes(np.array([1, 2, *heads], "<u8").tobytes() + b"".join(names) + bytes(300))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (
        broken(lambda s: s.__delitem__("decoder.layers.1.self_attention.fc_v.weight")),
        "no tensor 'decoder.layers.1.self_attention.fc_v.weight'",
    ),
    "surplus": (
        broken(lambda s: s.update({"decoder.extra.weight": torch.ones(2, 2), "more": torch.ones(3)})),
        "tensors that this format does not know: decoder.extra.weight, more",
    ),
    "wrong shape": (
        broken(lambda s: s.update({"encoder.layers.0.ff_layer_norm.weight": torch.ones(31)})),
        r"encoder.0.ff_residual.norm.weight would be \(31,\), not \(32,\)",
    ),
    "one axis": (
        broken(lambda s: s.update({"encoder.tok_embedding.weight": torch.ones(40)})),
        r"'encoder.tok_embedding.weight' is of shape \(40,\): must have 2 axes",
    ),
    "NaN": (
        broken(lambda s: s.update({"decoder.fc_out.bias": torch.full((44,), float("nan"))})),
        "tensor 'decoder.fc_out.bias' has NaN or infinite values",
    ),
    "whole numbers": (
        broken(lambda s: s.update({"decoder.fc_out.bias": torch.ones(44, dtype=torch.int64)})),
        "'decoder.fc_out.bias' is int64, not floating point",
    ),
    "code": (broken(lambda s: {"model": Evil()}), "is refused: loading it would execute .*save model.state_dict"),
    "no tensors": (broken(lambda s: {"a": 1}), "holds no tensors: save model.state_dict"),
    "one number for all": (
        broken(lambda s: s.update({"decoder.fc_out.bias": torch.zeros(1).expand(44)})),
        "tensor 'decoder.fc_out.bias' repeats its values",
    ),
    "no values": (
        broken(lambda s: s.update({"decoder.fc_out.bias": torch.zeros(44, device="meta")})),
        "tensor 'decoder.fc_out.bias' has no values of its own",
    ),
    "sparse": (
        broken(lambda s: s.update({"decoder.fc_out.bias": torch.zeros(44).to_sparse()})),
        "tensor 'decoder.fc_out.bias' has no values of its own",
    ),
    "a list": (broken(lambda s: [1, 2]), "holds a list, not a state dict"),
    "damaged": (lambda path: path.write_bytes(b"PK\x03\x04 not a zip") and None, "is damaged|is refused"),
    "a bomb": (bomb, "unpacks to"),
    "empty": (lambda path: path.write_bytes(b"") and None, "is damaged: .*: copy it again"),
    "half of a zip": (half, "is damaged|is refused"),
    "nothing": (lambda path: None, "is not there"),
    "nested keys": (zipped(nested(45)), "is damaged: tuples within tuples hold too much"),
    "a far place": (zipped(b"\x80\x02}r\xff\xff\xff\x7f."), "is damaged: object 2147483647 follows object 0"),
    "Marian's binary": (of_marian, "is a file of marian, not of torch.save"),
    "TorchScript": (
        lambda path: torch.jit.save(torch.jit.script(torch.nn.Identity()), path),
        "is a program of TorchScript: save model.state_dict",
    ),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps({})) and None, "is a pickle, not a file of torch.save"),
    "a slice": (broken(lambda s: {"model": slice(1)}), "would execute slice: save model.state_dict"),
    "a pipe": (os.mkfifo, "is no regular file: copy or make it again"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is no regular file: copy or make it again"),
    "what the kernel makes up": (lambda path: path.symlink_to("/proc/kmsg"), "is no regular file"),
}


@pytest.mark.parametrize(("write", "message"), BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_read_is_one_line_and_leaves_nothing(
    write: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "model.pt")
    vocab = {"src_vocab": write_words(tmp_path / "src", 40), "tgt_vocab": write_words(tmp_path / "tgt", 44)}
    with pytest.raises(TformerError, match=message) as caught:
        import_checkpoint("pytorch-seq2seq", tmp_path / "model.pt", tmp_path / "run", ImportOptions(heads=4, **vocab))
    assert "weights_only" not in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "model.pt") == ["src", "tgt"]


def test_wrong_options(tmp_path: Path) -> None:
    path, words = tmp_path / "model.pt", write_words(tmp_path / "words", 44)
    torch.save(seq2seq()[0], path)
    sides = {"src_vocab": write_words(tmp_path / "src", 40), "tgt_vocab": words}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "name the vocabulary with --vocab"),
        ({"vocab": words}, "has 44 entries, the embedding 40"),
        ({**sides, "heads": 5}, "heads=5 does not divide"),
        ({**sides, "language": "de"}, "--language de: write source and target language as in en-de"),
        ({**sides, "model": {"norm": "rms"}}, "tensors that this format does not know: .*norm.bias"),
        ({**sides, "language": "de-en", "split_regex": "x"}, "--language and --split-regex both split words"),
        ({**sides, "split_regex": "(a)|b"}, r"write groups as \(\?:"),
        ({**sides, "split_regex": r"\p{L}+"}, r"'\\p' is not the same in every language"),
        ({**sides, "split_regex": "x*"}, "matches nothing"),
        ({"src_vocab": write_words(tmp_path / "no", 40, ("<pad>",)), "tgt_vocab": words}, "no entry is called <eos>"),
    ]
    for options, message in wrong:
        with pytest.raises((ConfigError, ArtifactError), match=message):
            import_checkpoint("pytorch-seq2seq", path, tmp_path / "run", ImportOptions(**options))
        assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"looks like none of hf, annotated.*name one"):
        recognised(words)
    with pytest.raises(ConfigError, match="did you mean 'annotated'"):
        import_checkpoint("anotated", path, tmp_path / "run")
    part = ImportOptions(**sides, heads=4, parts={"src_embedding": "src_tok_emb.embedding"})
    other = {"src_tok_emb": "a", "tgt_tok_emb": "b"}
    state = {other.get(name.split(".")[0], "") + name: x for name, x in of_torch(False, False, True, True)[0].items()}
    torch.save(state, path)
    with pytest.raises(ConfigError, match=r"the src_embedding is none of .*: name it with --part src_embedding=NAME"):
        import_checkpoint("torch", path, tmp_path / "run", part)


def test_positions_are_whole_parts_of_names(tmp_path: Path) -> None:
    """Other names hold `pe` and `pos` too; what is named by --part is not guessed."""
    words = {"src_vocab": write_words(tmp_path / "src", 40), "tgt_vocab": write_words(tmp_path / "tgt", 44)}
    options: dict[str, Any] = {**words, "heads": 4}
    state = of_torch(False, False, True, True)[0]
    for source, parts in (
        ("peptide_embed", {"src_embedding": "peptide_embed.embedding"}),
        ("composer_src", {}),
        ("src_pos", {"src_embedding": "src_pos.embedding"}),
        ("src_pos", {"src_embedding": "src_pos.embedding", "positions": "positional_encoding.pos_embedding"}),
    ):
        torch.save(
            {name.replace("src_tok_emb", source): tensor for name, tensor in state.items()}, tmp_path / "model.pt"
        )
        given = ImportOptions(**options, parts=parts)
        found, _ = import_checkpoint("torch", tmp_path / "model.pt", tmp_path / "run", given, force=True)
        assert found.config.positions == "learned" and found.config.src_vocab == 40
    odd = {name.replace("positional_encoding.pos_embedding", "places"): x for name, x in state.items()}
    torch.save({**odd, "places": odd["places"][:, 0]}, tmp_path / "model.pt")
    given = ImportOptions(**options, parts={"positions": "places"})
    found, _ = import_checkpoint("torch", tmp_path / "model.pt", tmp_path / "run", given, force=True)
    assert found.config.positions == "learned"


def test_vocabularies_of_every_kind(tmp_path: Path) -> None:
    words = ["<unk>", "<pad>", "<bos>", "<eos>", "\n", "a b", "ß"]
    ids = {word: i for i, word in enumerate(words)}
    for name, content in {
        "list": words,
        "ids": ids,
        "itos": {"itos": words, "stoi": ids},
        "stoi": {"stoi": ids},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        (tmp_path / f"{name}.pkl").write_bytes(pickle.dumps(content))
        assert read_entries(tmp_path / f"{name}.json") == read_entries(tmp_path / f"{name}.pkl") == words
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ArtifactError, match=r"refused: loading it would execute .*: write the words to a text file"):
        read_entries(tmp_path / "evil.pkl")
    (tmp_path / "nested").write_bytes(nested(45))
    with pytest.raises(ArtifactError, match=r"nested is damaged: .*tuples within tuples hold too much"):
        read_entries(tmp_path / "nested")
    (tmp_path / "words").write_bytes(pickle.dumps({"itos": words, "counts": [("a", 3), ("b", 2)]}))
    assert read_entries(tmp_path / "words") == words
    for content in (3, {"a": "b"}, {"a": 1 << 40}, [1], {"a": -1}):
        (tmp_path / "bad.json").write_text(json.dumps(content))
        with pytest.raises(ArtifactError, match="is not a vocabulary"):
            read_entries(tmp_path / "bad.json")
    for name in ("latin.txt", "latin.json"):
        (tmp_path / name).write_bytes(b'["\xe9"]')
        with pytest.raises(ArtifactError, match=f"{name} is not UTF-8: .*: save it as UTF-8"):
            read_entries(tmp_path / name)
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ArtifactError, match=r"large.txt has \d+ bytes, more than \d+"):
        read_entries(tmp_path / "large.txt")


def test_the_tutorial_of_multi30k_keeps_the_ends_of_lines(tmp_path: Path) -> None:
    """Its vocabulary has them as a word, which every source ends with; a word file cannot hold it, JSON can."""
    torch.save(multi30k()[0], tmp_path / "model.pt")
    entries = write_words(tmp_path / "src", 40).read_text().split()
    (tmp_path / "src.json").write_text(json.dumps([*entries[:4], "\n", *entries[5:]]))
    options = ImportOptions(src_vocab=tmp_path / "src.json", tgt_vocab=write_words(tmp_path / "tgt", 44), heads=4)
    import_checkpoint("multi30k-tutorial", tmp_path / "model.pt", tmp_path / "run", options)
    tokenizers = open_checkpoint(tmp_path / "run").tokenizers
    assert tokenizers.source_ids("w9 w10.") == [2, 9, 10, 0, 4, 3]
    assert tokenizers.source_ids("w9")[0] == 2 and tokenizers.source.size == 40
    split = replace(options, split_regex="[a-z][0-9]")  # in place of spaCy's rules
    import_checkpoint("multi30k-tutorial", tmp_path / "model.pt", tmp_path / "run", split, force=True)
    assert open_checkpoint(tmp_path / "run").tokenizers.source_ids("w9w8") == [2, 9, 8, 4, 3]
