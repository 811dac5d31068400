"""What small data wants of training: each option does what its definition says, and a resumed run is exact with it."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tformer_deploy.base.errors import ArtifactError, ConfigError
from tformer_deploy.base.files import sha256, write_json
from tformer_deploy.base.headers import digest
from tformer_deploy.bundle.text import SentencePiece, train_tokenizers
from tformer_deploy.model.checkpoint import load_tensors, model_tensors, open_checkpoint, save_tensors
from tformer_deploy.model.config import TrainConfig
from tformer_deploy.train.data import BatchStream, DataConfig, EncodedPairs, Parallel, Sampling, load_data
from tformer_deploy.train.keeping import best_of, candidates
from tformer_deploy.train.losses import twice
from tformer_deploy.train.metrics import tokenized_bleu
from tformer_deploy.train.run_files import EMA, STATE, read_state
from tformer_deploy.train.runs import RunSettings, start_run
from tformer_deploy.train.schedule import dropout_factor, label_smoothing
from tformer_deploy.translate.translator import Result, Translator

from .command import failed_line, printed, run_here
from .test_train import (  # noqa: F401
    NO_DROPOUT,
    QUICK,
    SMALL,
    TORCHRUN,
    VOCAB,
    arguments,
    assert_same_weights,
    data,
    final_weights,
    interrupt,
    launch,
    one_thread_and_no_plots,
    resume,
    rows,
    snapshot,
    start,
)

TEXT = Parallel(
    ["a small dog runs over the green grass", "two men are playing guitar on the street", "a girl in a red coat"] * 5,
    ["ein kleiner hund rennt über das gras", "zwei männer spielen auf der straße gitarre", "ein kind im roten mantel"]
    * 5,
)


def corpus(kind: str, max_tokens: int = 100) -> tuple[EncodedPairs, Any]:
    tokenizers = train_tokenizers(kind, TEXT.src, TEXT.tgt, 60, (None, None))
    return EncodedPairs(TEXT, tokenizers, max_tokens), tokenizers


def as_lists(side: list[Any]) -> list[list[int]]:
    return [ids.tolist() for ids in side]


# Pieces


@pytest.mark.parametrize(("kind", "nbest"), [("bpe", -1), ("unigram", -1), ("unigram", 8)])
def test_pieces_differ_by_epoch_and_repeat_with_the_seed(kind: str, nbest: int) -> None:
    pairs, tokenizers = corpus(kind)
    best, sampling, found = (as_lists(pairs.src), as_lists(pairs.tgt)), Sampling(0.3, 0.3, nbest), {}
    for seed, epoch in [(1, 0), (1, 1), (2, 0), (1, 0)]:
        pairs.draw(sampling, seed, epoch)
        sides = as_lists(pairs.src), as_lists(pairs.tgt)
        assert found.setdefault((seed, epoch), sides) == sides, "the same seed and epoch give the same"
        for side, lines, tokenizer in zip(sides, (TEXT.src, TEXT.tgt), tokenizers_of(tokenizers), strict=True):
            assert [tokenizer.decode(ids) for ids in side] == lines, "other pieces are the same text"
            assert all(ids[-1] == tokenizer.specials.eos for ids in side)
    for one, other in itertools.combinations([best, *found.values()], 2):
        assert one[0] != other[0] and one[1] != other[1]
    assert len({tuple(ids) for ids in as_lists(pairs.src)[::3]}) > 1, "a line that stands twice has pieces of its own"


def tokenizers_of(tokenizers: Any) -> tuple[Any, Any]:
    return tokenizers.source, tokenizers.target


def test_each_side_is_sampled_by_itself() -> None:
    pairs, _ = corpus("bpe")
    best, found = (as_lists(pairs.src), as_lists(pairs.tgt)), {}
    for src, tgt in itertools.product((0.0, 0.3), repeat=2):
        pairs.draw(Sampling(src, tgt), 1, 0)
        found[src, tgt] = as_lists(pairs.src), as_lists(pairs.tgt)
    assert found[0.0, 0.0] == best
    assert found[0.3, 0.0] == (found[0.3, 0.3][0], best[1]) and found[0.3, 0.0][0] != best[0]
    assert found[0.0, 0.3] == (best[0], found[0.3, 0.3][1]) and found[0.0, 0.3][1] != best[1]


def test_more_sampling_makes_more_pieces_and_a_line_that_gets_too_many_keeps_its_best_ones() -> None:
    pairs, _ = corpus("bpe")
    best, counts = as_lists(pairs.src), []
    for alpha in (0.05, 0.5, 1.0):
        pairs.draw(Sampling(alpha), 1, 0)
        counts.append(sum(map(len, pairs.src)))
    assert sum(map(len, best)) < counts[0] < counts[1] < counts[2]
    assert [len(ids) for ids in pairs.src[:3]] == [len(line) + 2 for line in TEXT.src[:3]], "no merge: characters"
    drawn, limit = as_lists(pairs.src), max(map(len, [*best, *pairs.tgt]))
    narrow, _ = corpus("bpe", limit)
    narrow.draw(Sampling(1.0), 1, 0)
    kept = [one if len(one) <= limit else other for one, other in zip(drawn, best, strict=True)]
    assert as_lists(narrow.src) == kept and kept not in (drawn, best)


def test_batches_are_planned_for_the_pieces_of_their_epoch() -> None:
    pairs, _ = corpus("bpe")
    stream = BatchStream(pairs, 150, 1, sampling=Sampling(0.5, 0.5))
    for indices in itertools.islice(stream, 40):
        batch = pairs.batch(indices, 1, 2)
        assert len(indices) == 1 or len(indices) * max(batch.src_ids.shape[1], batch.tgt_in.shape[1]) <= 150
        assert pairs.target_tokens(indices) == int((batch.tgt_out != 1).sum())
    assert stream.epoch >= 2


def test_words_have_no_pieces_to_draw(tmp_path: Path) -> None:
    run = RunSettings("tiny", "words", VOCAB, SMALL, {**QUICK, "tgt_sampling": 0.1})
    with pytest.raises(ConfigError, match=r"train\.tgt_sampling need pieces: add --tokenizer bpe or unigram"):
        start_run(tmp_path, DataConfig(task="copy"), run)


def test_a_unigram_model_is_learned_and_stored(data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    run = RunSettings("tiny", "unigram", VOCAB, SMALL, {**QUICK, "updates": 2, "src_sampling": 0.2})
    start_run(tmp_path, data, run).run()
    stored = open_checkpoint(tmp_path).tokenizers.source
    assert isinstance(stored, SentencePiece) and stored.size == VOCAB
    best = stored.encode("abc def")
    assert stored.sampled(["abc def"] * 20, 1, 0.2, 2) != [best] * 20


# Exact resume


@pytest.mark.parametrize(
    "settings",
    [
        {"src_sampling": 0.3},
        {"src_sampling": 0.1, "tgt_sampling": 0.3, "sampling_nbest": 5},
        {"rdrop": 3.0},
        {"ema": 0.8, "keep": "ema"},
        {"ema": 0.8, "keep": "bleu", "keep_beams": 3},
        {"ema": 0.8, "keep": "loss", "accumulate": 2, "src_sampling": 0.2, "rdrop": 1.0},
        {"label_smoothing_end": 0.0, "dropout_start": 0.0, "dropout_end": 1.0},
    ],
    ids=lambda settings: " ".join(settings),
)
@pytest.mark.parametrize("update", [7, pytest.param(20, marks=pytest.mark.long), 33])
def test_a_resumed_run_is_exact(data: DataConfig, tmp_path: Path, update: int, settings: dict[str, Any]) -> None:  # noqa: F811
    """Updates 7 and 33 are in the middle of an epoch, 20 is validated."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = {"updates": 50, "valid_every": 20, "average": 2, **settings}
    figures = start(whole, data, **settings).run()
    interrupt(broken, data, update, settings)
    assert resume(broken).run() == figures
    assert rows(broken) == rows(whole)
    assert snapshot(broken / "weights") == snapshot(whole / "weights")
    state = read_state(whole)["state"]
    assert (broken / state).read_bytes() == (whole / state).read_bytes()
    kept = [open_checkpoint(folder).header["training"] for folder in (whole, broken)]
    assert kept[0] == kept[1]


def test_a_run_that_chose_can_be_lengthened(data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    settings = {"valid_every": 5, "average": 2, "ema": 0.8, "keep": "loss", "src_sampling": 0.2}
    figures = start(tmp_path / "whole", data, updates=20, **settings).run()
    start(tmp_path / "longer", data, updates=10, **settings).run()
    assert resume(tmp_path / "longer", updates=20).run() == figures
    assert_same_weights(tmp_path / "whole", tmp_path / "longer")
    assert rows(tmp_path / "longer", "valid_loss") == rows(tmp_path / "whole", "valid_loss")


@pytest.mark.long
def test_two_processes_give_what_one_gives(data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    settings = {"updates": 40, "valid_every": 20, "average": 2, "lr": 0.003, "src_sampling": 0.3, "ema": 0.8}
    settings |= {"rdrop": 1.0, "keep": "loss"}
    process = launch(*arguments(tmp_path / "two", data, model=NO_DROPOUT, **settings), module=TORCHRUN)
    start(tmp_path / "one", data, model=NO_DROPOUT, accumulate=2, **settings).run()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = [[row["valid_loss"] for row in rows(tmp_path / name, "valid_loss")] for name in ("one", "two")]
    assert len(found[0]) == 5 and found[1] == pytest.approx(found[0], rel=1e-4)
    one, two = (open_checkpoint(tmp_path / name).header["training"] for name in ("one", "two"))
    assert two["kept"] == one["kept"] and two["candidates"] == pytest.approx(one["candidates"], rel=1e-4)
    assert err.count("kept: ") == 1


@pytest.mark.long
def test_all_of_it_learns_to_copy(tmp_path: Path) -> None:
    model = {**NO_DROPOUT, "dropout": 0.1, "d_model": 64, "d_ff": 64, "heads": 2, "encoder_layers": 1}
    settings = {"updates": 900, "batch_tokens": 384, "lr": 0.005, "warmup": 60, "valid_every": 100, "average": 3}
    settings |= {"rdrop": 1.0, "ema": 0.97, "keep": "bleu", "dropout_end": 0.0, "label_smoothing_end": 0.0}
    settings |= {"bleu_sentences": 0, "src_sampling": 0.05}
    run = RunSettings("tiny", "unigram", 20, {**model, "decoder_layers": 1}, settings)
    figures = start_run(tmp_path, DataConfig(task="copy"), run).run()
    assert figures["exact_match"] > 0.8 and figures["bleu"] > 90


# R-Drop


def test_rdrop_is_the_loss_of_its_paper(data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    """Half of it, from the probabilities of each position, in doubles."""
    trainer, smooth, weight = start(tmp_path, data, model={"dropout": 0.3}), 0.1, 5.0
    batch = trainer.batch(trainer.train_set, trainer.train_set.plan(200, 1, 0)[0])
    trainer.model.train()
    torch.manual_seed(5)
    found = trainer.loss(batch, smooth, weight)
    torch.manual_seed(5)
    both = twice(batch)
    inputs = (torch.from_numpy(each) for each in (both.src_ids, both.src_lengths, both.tgt_in))
    logs = trainer.model(*inputs).double().log_softmax(-1)
    one, other = (each.numpy(force=True) for each in logs.chunk(2))
    loss, count = 0.0, 0
    for row, position in zip(*np.nonzero(batch.tgt_out != trainer.model.config.pad_id), strict=True):
        p, q, target = one[row, position], other[row, position], batch.tgt_out[row, position]
        for scores in (p, q):
            loss -= (1 - smooth) * scores[target] + smooth * scores.mean()
        both_ways = (np.exp(p) * (p - q)).sum() + (np.exp(q) * (q - p)).sum()
        assert both_ways > 0
        loss += weight * both_ways / 2
        count += 1
    assert count and found.item() == pytest.approx(loss / 2, rel=1e-5)


@pytest.mark.parametrize("dropout", [False, True])
def test_rdrop_adds_nothing_without_dropout(data: DataConfig, tmp_path: Path, dropout: bool) -> None:  # noqa: F811
    losses = []
    for weight in (0.0, 2.0, 50.0):
        model = {"dropout": 0.3} if dropout else NO_DROPOUT
        trainer = start(tmp_path, data, model=model, force=True, rdrop=weight)
        trainer.progress.update = 1
        figures = trainer.train_update(iter(trainer.train_set.plan(128, 1, 0)))
        losses.append((figures["loss"], figures["grad_norm"]))
    if dropout:
        assert losses[0] != losses[1] and losses[2][0] > losses[1][0] + 0.01
    else:
        assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


# Moving mean


def test_the_moving_mean_is_its_closed_form(data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    decay, updates = 0.7, 9
    trainer = start(tmp_path, data, updates=updates, valid_every=4, ema=decay, keep="ema")
    step, seen = trainer.optimizer.step, []

    def stepped() -> None:
        step()
        seen.append({name: tensor.double().clone() for name, tensor in model_tensors(trainer.model).items()})

    trainer.optimizer.step = stepped  # type: ignore[method-assign,assignment]
    trainer.run()
    shares = [decay**age for age in range(updates - 1, -1, -1)]
    kept, stored = open_checkpoint(tmp_path), load_tensors(tmp_path / read_state(tmp_path)["state"])
    assert len(seen) == updates and kept.weights == tmp_path / EMA
    for name, found in load_tensors(kept.weights).items():
        expected = sum(share * each[name] for share, each in zip(shares, seen, strict=True)) / sum(shares)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(stored[f"ema.{name}"], found)
    assert any(not torch.allclose(kept_, last) for kept_, last in pairs_of(final_weights(tmp_path), seen[-1]))


def pairs_of(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(one[name], other[name].float()) for name in one]


def test_a_state_without_the_mean_is_refused(data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    start(tmp_path, data, updates=4, ema=0.9).run()
    header = json.loads((tmp_path / STATE).read_text())
    path = tmp_path / header["state"]
    tensors = {name: each for name, each in load_tensors(path).items() if not name.startswith("ema.")}
    save_tensors(path, tensors)
    header["files"][header["state"]] = sha256(path)
    write_json(tmp_path / STATE, {**header, "sha256": digest(header)})
    with pytest.raises(ArtifactError, match=r"is incomplete: 'ema\..*' is missing"):
        resume(tmp_path)


# What is kept


@pytest.mark.parametrize("keep", ["average", "last", "ema", "loss", "bleu"])
def test_the_run_keeps_what_it_says(
    data: DataConfig,  # noqa: F811
    tmp_path: Path,
    keep: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = start(tmp_path, data, updates=40, valid_every=10, average=2, ema=0.9, keep=keep)
    figures, checkpoint = trainer.run(), open_checkpoint(tmp_path)
    header, weights = checkpoint.header["training"], load_tensors(checkpoint.weights)
    steps = [load_tensors(tmp_path / name) for name in trainer.hashes]
    made = {
        "average": {name: (steps[0][name] + steps[1][name]) / 2 for name in weights},
        "last": steps[1],
        "ema": trainer.ema.tensors,
    }
    kept = header.get("kept", keep)
    for name in weights:
        torch.testing.assert_close(weights[name], made[kept][name])
    assert any(not torch.equal(weights[name], steps[1][name]) for name in weights) is (kept != "last")
    files = {*trainer.hashes, checkpoint.weights.relative_to(tmp_path).as_posix()}
    assert {f"weights/{path.name}" for path in (tmp_path / "weights").iterdir()} == files
    last = [row for row in rows(tmp_path, "valid_loss") if {"averaged", "weights"} & row.keys()]
    if keep not in ("loss", "bleu"):
        assert "kept" not in header and last == [figures]
        return
    measure = {"loss": "valid_loss", "bleu": "bleu"}[keep]
    found = dict(zip(("average", "last", "ema"), (row[measure] for row in last), strict=True))
    assert header["candidates"] == found and header["measure"] == measure
    assert figures[measure] == found[kept] == (min if keep == "loss" else max)(found.values())
    assert f"kept: {kept}, {measure} " in capsys.readouterr().err
    trainer.put(kept)
    again = trainer.validate(len(trainer.valid_text.src))
    assert again[measure] == figures[measure]


def test_the_best_of_several_is_chosen_by_its_measure() -> None:
    assert candidates(TrainConfig(keep="ema", ema=0.9)) == ["ema"]
    assert candidates(TrainConfig(keep="bleu")) == ["average", "last"]
    assert candidates(TrainConfig(keep="loss", ema=0.9)) == ["average", "last", "ema"]
    found = {
        "average": {"valid_loss": 1.6, "bleu": 37.7, "chrf": 61.2},
        "last": {"valid_loss": 1.5, "bleu": 36.5, "chrf": 60.8},
        "ema": {"valid_loss": 1.7, "bleu": 37.9, "chrf": 61.0},
    }
    best, line, record = best_of(found, "loss")
    assert best == "last" and line == "kept: last, valid_loss 1.5000 on validation (average 1.6000, ema 1.7000)"
    assert record == {
        "kept": "last",
        "measure": "valid_loss",
        "candidates": {"average": 1.6, "last": 1.5, "ema": 1.7},
    }
    assert best_of(found, "bleu")[1] == "kept: ema, bleu 37.90 on validation (average 37.70, last 36.50)"
    short = {name: {key: value for key, value in each.items() if key != "bleu"} for name, each in found.items()}
    assert best_of(short, "bleu")[0] == "average" and best_of(short, "bleu")[2]["measure"] == "chrf"
    equal = {name: {"valid_loss": 1.0} for name in ("average", "last")}
    assert best_of(equal, "loss")[0] == "average"


def test_beams_of_the_last_validation(data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    asked, translate = [], Translator.translate

    def noted(translator: Translator, lines: list[str]) -> list[Result]:
        asked.append((len(lines), translator.options.beams))
        return translate(translator, lines)

    monkeypatch.setattr(Translator, "translate", noted)
    start(tmp_path, data, updates=4, valid_every=2, bleu_sentences=3, keep="bleu", keep_beams=4).run()
    assert asked == [(3, 1), (3, 1), (8, 4), (8, 4)]


# Schedules


def test_smoothing_and_dropout_go_linearly_over_the_run() -> None:
    settings = TrainConfig(updates=101, label_smoothing=0.2, label_smoothing_end=0.0, dropout_start=0.5)
    assert [label_smoothing(update, settings) for update in (1, 51, 101)] == pytest.approx([0.2, 0.1, 0.0])
    assert [dropout_factor(update, settings) for update in (1, 51, 101)] == pytest.approx([0.5, 0.75, 1.0])
    usual = TrainConfig(updates=1)
    assert (label_smoothing(1, usual), dropout_factor(1, usual)) == (0.1, 1.0)


def test_a_factor_of_zero_is_a_model_without_dropout(data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    """And one that falls reaches every dropout of the model."""
    dropped = {key: 0.5 for key in NO_DROPOUT}
    start(tmp_path / "none", data, model=NO_DROPOUT, updates=6).run()
    start(tmp_path / "zero", data, model=dropped, updates=6, dropout_start=0.0, dropout_end=0.0).run()
    assert_same_weights(tmp_path / "none", tmp_path / "zero")
    trainer = start(tmp_path / "falls", data, model=dropped, updates=3, dropout_end=0.0)
    found = []
    for update in (1, 2, 3):
        trainer.progress.update = update
        trainer.train_update(iter(trainer.train_set.plan(128, 1, 0)))
        found.append({each.dropout for each in trainer.model.modules() if hasattr(each, "dropout")})
    assert found == [{0.5}, {0.25}, {0.0}]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ema": 1.0}, "train.ema=1.0: must be at least 0 and less than 1"),
        ({"keep": "ema"}, "train.keep=ema needs such a mean: set train.ema=0.999 as well"),
        ({"keep": "best"}, "unknown keep 'best'"),
        ({"rdrop": -1.0}, "rdrop=-1.0: must be at least 0"),
        ({"src_sampling": 1.5}, "train.src_sampling=1.5: must be from 0 to 1"),
        ({"sampling_nbest": 1}, "train.sampling_nbest=1: must be -1, or from 2 to 512"),
        ({"label_smoothing_end": 1.0}, "train.label_smoothing_end=1.0: must be -1, or from 0 to below 1"),
        ({"dropout_end": 2.0}, "train.dropout_end=2.0: must be from 0 to 1"),
        ({"keep_beams": 65}, "keep_beams=65: must be at most 64"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        TrainConfig(**settings)


# Text as published scores take it


def plain_bleu(made: list[str], reference: list[str]) -> float:
    """Papineni et al. 2002, of one reference, without smoothing."""
    logs = 0.0
    for n in range(1, 5):
        right = total = 0
        for one, other in zip(made, reference, strict=True):
            found, expected = (
                Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
                for words in (one.split(), other.split())
            )
            right += sum(min(count, expected[gram]) for gram, count in found.items())
            total += sum(found.values())
        if not right:
            return 0.0
        logs += math.log(right / total) / 4
    ours, theirs = (sum(len(line.split()) for line in lines) for lines in (made, reference))
    return 100 * min(1.0, math.exp(1 - theirs / ours)) * math.exp(logs)


def test_bleu_of_tokens_is_the_plain_formula() -> None:
    rng = random.Random(1)
    reference = [" ".join(rng.choices("abcde", k=rng.randint(4, 12))) for _ in range(40)]
    made = [" ".join(word for word in line.split() if rng.random() < 0.9) for line in reference]
    assert 0 < plain_bleu(made, reference) < 90
    assert tokenized_bleu(made, reference) == pytest.approx(plain_bleu(made, reference))
    assert tokenized_bleu(["a b c d"], ["a b c e"]) == plain_bleu(["a b c d"], ["a b c e"]) == 0, "not smoothed"
    words = ["das ist gut , oder ? &quot; ja &quot;"]
    assert tokenized_bleu(words, words) == pytest.approx(100)


USUAL = ['Zwei Männer sagen: "Hallo", dann gehen sie.', "Ein T-Shirt kostet 3,50 €; das ist's!"]
TOKENS = [
    "zwei männer sagen : &quot; hallo &quot; , dann gehen sie .",
    "ein t-shirt kostet 3,50 € ; das ist &apos; s !",
]


@pytest.fixture
def moses() -> None:
    pytest.importorskip("sacremoses", reason="sacremoses is not installed: it is in the 'train' extra")


def test_prepared_lines(moses: None) -> None:
    found = [
        printed(run_here("prepare", "--language", "de", *json_, stdin="\n".join(USUAL).encode()))
        for json_ in ((), ("--json",))
    ]
    assert found[0] == TOKENS == [json.loads(line)["text"] for line in found[1]]


def test_training_on_prepared_text(data: DataConfig, tmp_path: Path, moses: None) -> None:  # noqa: F811
    lines, names = [*USUAL, *USUAL], ("src", "tgt", "valid_src", "valid_tgt")
    for name in names:
        (tmp_path / name).write_text("\n".join(lines))
    found = DataConfig(*(str(tmp_path / name) for name in names), pair="de-de", prepare="moses")
    assert load_data(found) == (Parallel(TOKENS * 2, TOKENS * 2),) * 2
    trainer = start(tmp_path / "run", found, updates=2, bleu_sentences=4, batch_tokens=400)
    assert set(trainer.train_set.text.src) == {TOKENS[1]}, "the other one is too long for the model"
    assert "bleu" in trainer.run()
    assert open_checkpoint(tmp_path / "run").header["training"]["data"]["prepare"] == "moses"
    with pytest.raises(ConfigError, match="unknown --prepare 'moss': did you mean 'moses'"):
        load_data(DataConfig(task="copy", prepare="moss"))


def test_scores_side_by_side(tmp_path: Path, moses: None) -> None:
    reference, made = tmp_path / "reference", tmp_path / "made"
    reference.write_text("\n".join(USUAL))
    made.write_text("\n".join([USUAL[0].replace("Hallo", "hallo"), USUAL[1].replace("kostet", "hat")]))
    arguments = ["bleu", made, "--reference", reference, "--language", "de", "--json"]
    usual = json.loads(printed(run_here(*arguments))[0])
    assert usual["multi_bleu"] == pytest.approx(plain_bleu([TOKENS[0], TOKENS[1].replace("kostet", "hat")], TOKENS))
    assert usual["sacrebleu"] < usual["sacrebleu_lc"] < 100
    made.write_text("\n".join([TOKENS[0], TOKENS[1].replace("kostet", "hat")]))
    tokens = json.loads(printed(run_here(*arguments, "--prepared"))[0])
    assert tokens["multi_bleu"] == usual["multi_bleu"] and tokens.keys() == {"multi_bleu", "sacrebleu_lc"}
    shown = printed(run_here(*arguments[:-1], "--prepared"))
    assert shown[0].startswith(f"{tokens['multi_bleu']:6.2f}  lower-cased, Moses tokens") and len(shown) == 2
    made.write_text("one\n")
    assert "made has 1 lines, " in failed_line(run_here(*arguments))


def test_without_sacremoses_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    monkeypatch.delitem(sys.modules, "tformer_deploy.train.moses", raising=False)
    assert "'sacremoses' is not installed: pip install '.[train]'" in failed_line(
        run_here("prepare", "--language", "de")
    )
