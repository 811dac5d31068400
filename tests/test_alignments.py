"""Guided alignment: links of words become links of pieces, the loss is its definition, and the attention aligns."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tformer_deploy.base.errors import ArtifactError, ConfigError, DataError
from tformer_deploy.bundle.text import OUR_SPECIALS, SPECIALS, PieceList, SentencePiece, Tokenizer, Tokenizers, Words
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.model.checkpoint import open_checkpoint
from tformer_deploy.train.alignments import piece_links, pieces_of_words, read_links, require_guidable
from tformer_deploy.train.data import DataConfig, read_parallel
from tformer_deploy.train.loop import Trainer
from tformer_deploy.train.losses import alignment_loss
from tformer_deploy.train.runs import RunSettings, resume_run, start_run
from tformer_deploy.translate.translator import Translator

from .command import failed_line, run_here
from .test_train import (  # noqa: F401
    NO_DROPOUT,
    QUICK,
    SMALL,
    TORCHRUN,
    VOCAB,
    arguments,
    assert_same_weights,
    data,
    launch,
    one_thread_and_no_plots,
    rows,
    start,
)

LINES = ["a naïve  abc", "½ cab, bac", "aa ab\tbc", "日本 ab"]


@pytest.fixture(scope="module")
def aligned(data: DataConfig) -> DataConfig:  # noqa: F811
    """A translation is its source backwards, and so are its words."""
    lengths = [len(line.split()) for line in Path(data.src).read_text().splitlines()]
    path = Path(data.src).with_name("train.align")
    path.write_text("".join(" ".join(f"{i}-{n - 1 - i}" for i in range(n)) + "\n" for n in lengths))
    return replace(data, alignments=str(path))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("line", LINES)
def test_pieces_belong_to_the_words_that_they_spell(kind: str, line: str) -> None:
    tokenizer = SentencePiece.train([*LINES, "abc cab bac"], {"bpe": 34, "unigram": 23}[kind], kind)
    words = line.replace("½", "1\u20442").split()  # as sentencepiece writes it
    found = pieces_of_words(tokenizer, line)
    pieces = tokenizer._processor.encode_as_pieces(line)
    spelled = ["".join(pieces[place] for place in found[n]).replace("\u2581", "") for n in range(len(words))]
    assert spelled == words and sorted(place for each in found.values() for place in each) == list(range(len(pieces)))


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (Words([*SPECIALS, "it"], None), [[0], [1], [2]]),
        (Words([*SPECIALS, "it"], None, lower=True), [[0], [1], [2]]),
        (Words([*SPECIALS, "it"], "en"), [[0, 1], [2], [3, 4]]),
    ],
)
def test_words_of_rules_belong_to_words_between_spaces(tokenizer: Tokenizer, expected: list[list[int]]) -> None:
    assert [*pieces_of_words(tokenizer, "It's it it.").values()] == expected


def test_a_link_joins_all_pieces_of_both_words() -> None:
    letters = SentencePiece.train(["abc cab bac ccc"], 8)  # a piece a letter, and one a space
    words = Words([*SPECIALS, "x"], None)
    links = piece_links([(1, 0), (0, 2)], "ab c", "x x x", Tokenizers(letters, words, prefix=(7, 7)))
    pieces = [letters.pieces([i])[0] for i in letters.encode("ab c")]
    start = next(n for n, piece in enumerate(pieces) if n and piece.startswith("\u2581"))
    assert links.tolist() == [[0, 2 + n] for n in range(start, len(pieces))] + [[2, 2 + n] for n in range(start)]
    assert piece_links([], "ab c", "x", Tokenizers(letters, words)).shape == (0, 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0-0\n", "has 1 lines, the text 2: give the alignment of each"),
        ("0-0\n0-x\n", r":2: '0-x' is no link: write source and target word from 0, as in 0-0 1-2"),
        ("0-0\n0-0 2-0\n", r":2: 2-0 is beyond 2 source and 1 target words: align this text"),
        ("0-0\n0-1\n", r":2: 0-1 is beyond"),
        ("0--1\n\n", "is no link"),
    ],
)
def test_lines_that_are_no_alignments_are_refused(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "align").write_text(lines)
    with pytest.raises(DataError, match=message):
        read_links(tmp_path / "align", ["a", "b c"], ["d", "e"])


def test_empty_pairs_are_left_out_with_their_links(tmp_path: Path) -> None:
    for name, lines in (("src", "a\n\nb c\n"), ("tgt", "d\ne\nf\n"), ("align", "0-0\n\n1-0\n")):
        (tmp_path / name).write_text(lines)
    found = read_parallel(tmp_path / "src", tmp_path / "tgt", str(tmp_path / "align"))
    assert found.src == ["a", "b c"] and found.links == [[(0, 0)], [(1, 0)]]


@pytest.mark.parametrize("rdrop", [0.0, 1.5])
def test_the_loss_is_its_definition(aligned: DataConfig, tmp_path: Path, rdrop: float) -> None:
    """Cross-entropy of the mean over heads of the last layer, in plain loops; the rest of the loss is as without."""
    model = {**NO_DROPOUT, "decoder_layers": 2, "decoder_cell": "ssru" if rdrop else "attention"}
    trainer = start(tmp_path / "run", aligned, model, alignment_weight=0.3, rdrop=rdrop)
    indices = trainer.train_set.plan(200, 1, 0)[0]
    batch, links = trainer.batch(trainer.train_set, indices), trainer.train_set.links(indices)
    assert links is not None
    seen: dict[str, torch.Tensor] = {}
    sides = [torch.from_numpy(each) for each in (batch.src_ids, batch.src_lengths, batch.tgt_in)]
    trainer.model(*sides, seen=seen)
    attention, expected = seen["attention"].double().numpy(force=True), 0.0
    np.testing.assert_allclose(attention.sum(-1), 1, atol=1e-6)
    for row, target in {(int(row), int(target)) for row, target, _ in links}:
        places = [int(s) for r, t, s in links if (r, t) == (row, target)]
        expected -= sum(math.log(attention[row, target, place]) for place in places) / len(places)
    assert alignment_loss(seen["attention"], torch.from_numpy(links)).item() == pytest.approx(expected, rel=1e-5)
    without, guided = (trainer.loss(batch, 0.1, rdrop, links=each).item() for each in (None, links))
    assert guided - without == pytest.approx(0.3 * expected, rel=1e-4)


def test_its_gradient_is_that_of_the_attention(aligned: DataConfig, tmp_path: Path) -> None:
    attention = torch.rand(2, 3, 4, dtype=torch.double, requires_grad=True)
    links = torch.tensor([[0, 0, 1], [0, 0, 2], [1, 2, 3]], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda each: alignment_loss(each, links), [attention])
    assert alignment_loss(attention, links[:0]).item() == 0


def test_weight_0_and_no_alignments_train_the_same(aligned: DataConfig, data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    settings = {"updates": 4, "valid_every": 2, "average": 1}
    start(tmp_path / "one", data, **settings).run()
    start(tmp_path / "other", aligned, alignment_weight=0.0, **settings).run()
    start(tmp_path / "guided", aligned, **settings).run()
    assert_same_weights(tmp_path / "one", tmp_path / "other")
    assert rows(tmp_path / "one") == rows(tmp_path / "other") != rows(tmp_path / "guided")


def found_links(trainer: Trainer, config: DataConfig) -> float:
    """Share of the target pieces of words whose most attended source piece is of the word aligned to theirs."""
    text = read_parallel(Path(config.src), Path(config.tgt), config.alignments)
    right = total = 0
    trainer.model.eval()
    for number, (src, tgt) in enumerate(zip(text.src[:40], text.tgt[:40], strict=True)):
        links = piece_links(text.links[number], src, tgt, trainer.tokenizers)
        ids = trainer.tokenizers.target_ids(tgt)
        sides = ([trainer.tokenizers.source_ids(src)], [len(trainer.tokenizers.source_ids(src))], [[2, *ids[:-1]]])
        seen: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            trainer.model(*map(torch.tensor, sides), seen=seen)
        most = seen["attention"][0].argmax(-1).tolist()
        pairs = {(int(t), int(s)) for t, s in links}
        targets = {t for t, _ in pairs}
        right, total = right + sum((t, most[t]) in pairs for t in targets), total + len(targets)
    return right / total


def test_the_attention_that_is_guided_is_that_of_align(aligned: DataConfig, tmp_path: Path) -> None:
    """What `translate --align` prints of an output is the largest of the teacher-forced attention over it."""
    trainer = start(tmp_path / "run", aligned, updates=30, valid_every=30, average=1)
    trainer.run()
    model = open_checkpoint(tmp_path / "run").load_model()
    line = trainer.valid_text.src[0]
    with Translator(EagerEngine(model), trainer.tokenizers, DecodeOptions(align=True, max_tokens=12)) as translator:
        (result,) = translator.translate([line])
    source, seen = trainer.tokenizers.source_ids(line), dict[str, torch.Tensor]()
    with torch.no_grad():
        model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[2, *result.ids[:-1]]]), seen=seen)
    assert seen["attention"][0].argmax(-1).tolist() == result.alignment


@pytest.mark.long
def test_guided_attention_aligns(aligned: DataConfig, tmp_path: Path) -> None:
    """A small model that does not get far: without help, its attention is of no use as an alignment."""
    model, settings = {**NO_DROPOUT, "d_model": 32, "d_ff": 64}, {"updates": 400, "valid_every": 400, "average": 1}
    shares = {}
    for weight in (0.0, 1.0):
        trainer = start(tmp_path / str(weight), aligned, model, alignment_weight=weight, **settings)
        trainer.run()
        shares[weight] = found_links(trainer, aligned)
    assert shares[1.0] > 0.9 > shares[0.0] + 0.2


def test_a_resumed_run_ends_at_the_same_weights(aligned: DataConfig, tmp_path: Path) -> None:
    settings = {"valid_every": 3, "average": 2}
    start(tmp_path / "whole", aligned, updates=6, **settings).run()
    start(tmp_path / "parts", aligned, updates=3, **settings).run()
    resume_run(tmp_path / "parts", 6).run()
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    other = tmp_path / "other.align"
    other.write_text(Path(aligned.alignments).read_text().replace("0-", "1-", 1))
    with pytest.raises(ArtifactError, match="has changed: bring it back"):
        resume_run(tmp_path / "parts", 9, data=replace(aligned, alignments=str(other)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prepare", "moses"], "--alignments are of the text as it is"),
        (["--set", "train.src_sampling=0.1"], "--alignments are of fixed pieces: leave out train.src_sampling"),
        (["--set", "train.alignment_weight=-1"], "alignment_weight=-1.0: must be at least 0"),
    ],
)
def test_what_cannot_work_is_refused(aligned: DataConfig, tmp_path: Path, options: list[str], message: str) -> None:
    words = [*arguments(tmp_path / "run", aligned), "--alignments", aligned.alignments, *options]
    assert message in failed_line(run_here(*words))
    assert not (tmp_path / "run").exists()


def test_what_has_no_alignments_is_refused(aligned: DataConfig, data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="alignment_weight needs alignments: add --alignments FILE"):
        start(tmp_path / "run", data, alignment_weight=0.5)
    with pytest.raises(ConfigError, match="--alignments belongs to --src: leave it out with --task"):
        start(tmp_path / "run", DataConfig(task="copy", alignments=aligned.alignments))
    with pytest.raises(DataError, match="no such file"):
        start(tmp_path / "run", replace(aligned, alignments=str(tmp_path / "missing")))


def test_with_a_teacher(aligned: DataConfig, tmp_path: Path) -> None:
    """Its pieces are what is aligned."""
    start(tmp_path / "teacher", aligned, updates=2, valid_every=2, average=1).run()
    run = RunSettings("tiny", "", VOCAB, SMALL, {**QUICK, "updates": 2}, tmp_path / "teacher")
    assert start_run(tmp_path / "run", aligned, run).run()["valid_loss"] > 0


def test_pieces_that_do_not_say_where_they_begin_are_refused() -> None:
    letters = SentencePiece.train(["abc cab bac ccc"], 8)
    pieces = PieceList(letters._model, letters.pieces(range(8)), OUR_SPECIALS)
    require_guidable(Tokenizers(letters, letters))
    with pytest.raises(ConfigError, match="needs pieces of sentencepiece, or words, which the teacher has not"):
        require_guidable(Tokenizers(letters, pieces))


@pytest.mark.long
def test_two_processes_give_what_one_gives(aligned: DataConfig, tmp_path: Path) -> None:
    settings = {"updates": 20, "valid_every": 10, "average": 2, "lr": 0.003}
    words = [*arguments(tmp_path / "two", aligned, NO_DROPOUT, **settings), "--alignments", aligned.alignments]
    process = launch(*words, module=TORCHRUN)
    start(tmp_path / "one", aligned, NO_DROPOUT, accumulate=2, **settings).run()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = [[row["valid_loss"] for row in rows(tmp_path / name, "valid_loss")] for name in ("one", "two")]
    assert len(found[0]) == 3 and found[1] == pytest.approx(found[0], rel=1e-4)
