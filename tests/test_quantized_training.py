"""Training for 8 bits: it rounds where and as export does, learns the steps, and export takes them over."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tformer_deploy.base.errors import ConfigError, Interrupted
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.check.constants import compare_constants, trained_scales_off
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.calibrate import input_ranges, round_model, trained_ranges
from tformer_deploy.export.quantizing import Ranges, channels
from tformer_deploy.model.checkpoint import (
    LEARNED,
    Checkpoint,
    Steps,
    load_tensors,
    model_tensors,
    open_checkpoint,
    save_checkpoint,
    save_tensors,
)
from tformer_deploy.model.config import ModelConfig, TrainConfig
from tformer_deploy.model.network import Transformer
from tformer_deploy.train.data import DataConfig
from tformer_deploy.train.loop import Trainer
from tformer_deploy.train.quantized import (
    RoundedLinear,
    learned_steps,
    parameter_groups,
    quantize,
    round_input,
    round_rows,
)
from tformer_deploy.train.run_files import read_state
from tformer_deploy.train.runs import RunSettings, resume_run, start_run

from .command import failed_line, run_here
from .configs import CONFIGS, SSRU
from .conftest import random_model, random_sources, small_config, write_checkpoint
from .params import long_but
from .test_train import (  # noqa: F401
    NO_DROPOUT,
    QUICK,
    TORCHRUN,
    data,
    interrupt,
    launch,
    one_thread_and_no_plots,
    rows,
    snapshot,
    start,
)

TRAINED = "native-int8-trained"
UNTIED = "ssru, gated, nothing shared"
KINDS = {**CONFIGS, "ssru": SSRU, UNTIED: {**SSRU, "ff": "gated", "share_embeddings": "none"}}


@pytest.fixture(scope="module")
def first(data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A trained run to go on with. Read only."""
    folder = tmp_path_factory.mktemp("first") / "run"
    start(folder, data, model=NO_DROPOUT, updates=60, valid_every=60, average=1).run()
    return folder


def tuned(folder: Path, data: DataConfig, first: Path, **settings: Any) -> Trainer:  # noqa: F811
    """A run that goes on with `first` in 8 bits, and learns from it too if `teacher_weight` is given."""
    values = {**QUICK, "lr": 0.002, "quantize": "int8", **settings}
    teacher = first if "teacher_weight" in settings else None
    return start_run(folder, data, RunSettings("tiny", "", 0, {}, values, teacher, first))


def batch_of(config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    ids, lengths = random_sources(6, min(8, config.max_positions))
    rng = np.random.default_rng(5)
    target = rng.integers(4, config.tgt_vocab, ids.shape).astype(np.int32)
    return torch.from_numpy(ids % config.src_vocab), torch.from_numpy(lengths), torch.from_numpy(target)


def quantized(plain: Transformer) -> Transformer:
    """A copy that computes in 8 bits. Its steps are other than at first, so that some inputs are cut off."""
    model = Transformer(plain.config)
    model.load_state_dict(plain.state_dict())
    quantize(model, batch_of(plain.config))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith(LEARNED):
            parameter.data -= 0.2 + 0.01 * number
    return model.eval()


def steps_of(model: Transformer, folder: Path) -> Steps:
    save_tensors(folder / "weights.safetensors", model_tensors(model))
    found = learned_steps(model, folder / "weights.safetensors")
    assert found is not None
    return found


def exported_ranges(plain: Transformer, steps: Steps) -> Ranges:
    """What export makes of steps, by the names that calibration sees."""
    ids, lengths, _ = batch_of(plain.config)
    sources = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    return trained_ranges(plain, steps, input_ranges(plain, sources))


def test_a_step_has_the_gradient_of_the_paper() -> None:
    """Esser et al. 2020, equations 1 to 3 and the scale of section 2.2, in doubles and one number at a time."""
    rng = np.random.default_rng(1)
    x, grad = rng.normal(0, 60, (5, 7)).astype(np.float32), rng.normal(0, 1, (5, 7)).astype(np.float32)
    step = torch.tensor(0.5, requires_grad=True)
    given = torch.tensor(x, requires_grad=True)
    made = round_input(given, step)
    made.backward(torch.from_numpy(grad))  # type: ignore[no-untyped-call]
    of_step, of_x, expected = 0.0, np.zeros_like(x), np.zeros_like(x)
    for place, value in np.ndenumerate(x / 0.5):
        inside = -127 < value < 127
        of_step += grad[place] * (round(value) - value if inside else math.copysign(127, value))
        of_x[place] = grad[place] if inside else 0
        expected[place] = 0.5 * round(min(127, max(-127, value)))
    assert 5 < (of_x == 0).sum() < 30, "numbers of both kinds"
    assert step.grad is not None and step.grad.item() == pytest.approx(of_step / math.sqrt(7 * 127), rel=1e-5)
    assert given.grad is not None and np.array_equal(given.grad.numpy(), of_x)
    assert np.array_equal(made.detach().numpy(), expected)


def test_weights_are_exports_integers_and_their_gradients_pass_straight() -> None:
    weight = torch.randn(40, 9, generator=torch.Generator().manual_seed(2))
    weight[3], weight[4] = 0, 1e-12
    weight[5] *= 1e4
    weight.requires_grad_()
    made, grad = round_rows(weight), torch.randn(40, 9)
    made.backward(grad)  # type: ignore[no-untyped-call]
    integers, scales = channels(weight.detach().numpy())
    assert np.array_equal(made.detach().numpy(), integers * scales[:, None]) and np.abs(integers).max() == 127
    assert weight.grad is not None and torch.equal(weight.grad, grad)


@pytest.mark.parametrize("name", long_but(KINDS.keys(), "pre-norm", "every option", "T5", "ssru", UNTIED))
def test_it_computes_what_export_rounds(name: str, tmp_path: Path) -> None:
    """Every kind of model, against the copy by which export measures what its rounding does: the same numbers."""
    plain = random_model(small_config(**KINDS[name])).eval()
    model, batch = quantized(plain), batch_of(plain.config)
    with torch.no_grad():
        rounded = round_model(plain, load_recipe(TRAINED), exported_ranges(plain, steps_of(model, tmp_path)))
        exact, ours, theirs = plain(*batch), model(*batch), rounded(*batch)  # type: ignore[operator]
    assert torch.equal(ours, theirs) and not torch.allclose(ours, exact, atol=1e-3)


def test_layers_that_read_one_input_share_its_step(tmp_path: Path) -> None:
    model = quantized(random_model(small_config(ff="gated")))
    steps = steps_of(model, tmp_path).inputs
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert steps.keys() == linear
    together: dict[float, set[str]] = {}
    for name, step in steps.items():
        together.setdefault(step, set()).add(name.removesuffix(".weight"))
    shared = sorted(sorted(names) for names in together.values() if len(names) > 1)
    parts = [f"{side}.{i}.{part}" for side in ("decoder", "encoder") for i in (0, 1) for part in ("attention", "ff")]
    expected = [
        [f"{part}.{kind}" for kind in (("gate", "up") if part.endswith("ff") else ("key", "query", "value"))]
        for part in parts
    ]
    cross = sorted(f"decoder.{i}.cross.{kind}" for i in (0, 1) for kind in ("key", "value"))
    assert shared == sorted([*expected, cross])


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_program_computes_what_training_does(name: str, tmp_path: Path) -> None:
    """Step by step, up to fp32 sums in another order, which flip a rounding now and then."""
    pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
    from .test_native_models import FLIPPED, apart, export_programs, steps
    from .test_native_models import batch_of as sources_of

    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "run", small_config(**KINDS[name])))
    plain = checkpoint.load_model()
    model = quantized(plain)
    learned, batch, tokens = steps_of(model, tmp_path), sources_of(plain.config), list[Any]()
    with EagerEngine(plain) as eager:
        exact = steps(eager, batch, tokens)
    with EagerEngine(model) as eager:
        rounded = steps(eager, batch, tokens)
    ranges = exported_ranges(plain, learned)
    export_programs(checkpoint, tmp_path / "bundle", ranges, {TRAINED: load_recipe(TRAINED)})
    bundle = open_bundle(tmp_path / "bundle", graphs=False)
    with make_engine(f"native:{TRAINED}", bundle, threads=1) as engine:
        found = steps(engine, batch, tokens)
    assert apart(found, rounded) < FLIPPED * apart(exact, rounded)
    constants = compare_constants(bundle, TRAINED, bundle.variants[TRAINED], plain)
    assert not constants.wrong and not constants.unknown and constants.equal == constants.compared > 10
    measured = bundle.manifest["variants"][TRAINED]
    assert trained_scales_off(measured, learned) == [] and "scales" not in measured
    (wrong,) = trained_scales_off({**measured, "scales": {"output": 0.5}}, learned)
    assert "other scales of output" in wrong


def test_a_run_goes_on_with_another(data: DataConfig, first: Path, tmp_path: Path) -> None:  # noqa: F811
    """It has the other's model, vocabulary and weights; validation and what it saves are of the rounded model."""
    first, decoding = Path(shutil.copytree(first, tmp_path / "first")), {"beams": 3}
    before = open_checkpoint(first)
    save_checkpoint(first, before.config, before.tokenizers, before.weights, {}, decoding)
    trainer = tuned(tmp_path / "run", data, first, updates=20, valid_every=10, average=2)
    weights = {name: t for name, t in model_tensors(trainer.model).items() if not name.endswith(LEARNED)}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in before.load_tensors().items())
    assert weights.keys() == before.load_tensors().keys()
    figures = trainer.run()
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.decoding == decoding
    assert (checkpoint.config, checkpoint.tokenizer_hashes) == (before.config, before.tokenizer_hashes)
    record = {"run": str(first), "weights_sha256": before.weights_sha256}
    assert checkpoint.header["training"]["from"] == record == read_state(tmp_path / "run")["from"]
    assert checkpoint.load_tensors().keys() == weights.keys() and checkpoint.steps is not None
    plain = checkpoint.load_model()
    trainer.model = trainer.parallel = round_model(  # type: ignore[assignment]
        plain, load_recipe(TRAINED), exported_ranges(plain, checkpoint.steps)
    )
    assert trainer.validate(0)["valid_loss"] == figures["valid_loss"] < rows(first, "valid_loss")[-1]["valid_loss"]
    assert resume_run(tmp_path / "run").decoding == decoding


def test_steps_that_are_too_coarse_get_finer(data: DataConfig, first: Path, tmp_path: Path) -> None:  # noqa: F811
    trainer = tuned(tmp_path / "run", data, first, updates=40, valid_every=40, average=1)
    steps = [parameter for name, parameter in trainer.model.named_parameters() if name.endswith(LEARNED)]
    for parameter in steps:
        parameter.data += 3  # which leaves some 6 integers on each side of zero
    before, coarse = [parameter.item() for parameter in steps], trainer.validate(0)["valid_loss"]
    assert trainer.run()["valid_loss"] < coarse
    assert [parameter.item() < start for parameter, start in zip(steps, before, strict=True)].count(False) <= 1, before


def learned(path: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in load_tensors(path).items() if name.endswith(LEARNED)}


def test_means_are_of_the_steps_too(data: DataConfig, first: Path, tmp_path: Path) -> None:  # noqa: F811
    def reported(checkpoint: Checkpoint) -> dict[str, float]:
        assert checkpoint.steps is not None
        return {f"{name}{LEARNED}": step for name, step in checkpoint.steps.inputs.items()}

    tuned(tmp_path / "run", data, first, updates=20, valid_every=10, average=2, ema=0.9).run()
    saved = [learned(tmp_path / f"run/weights/step-00000{n}.safetensors") for n in (10, 20)]
    assert any(not torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    found = reported(open_checkpoint(tmp_path / "run"))
    for name, last in saved[1].items():
        assert found[name] == pytest.approx(((saved[0][name] + last) / 2).exp().item(), rel=1e-6)
    tuned(tmp_path / "ema", data, first, updates=20, valid_every=10, ema=0.9, keep="ema").run()
    found = reported(open_checkpoint(tmp_path / "ema"))
    state = load_tensors(tmp_path / "ema/train/state-0000020.safetensors")
    for name in saved[0]:
        assert found[name] == pytest.approx(state[f"ema.{name}"].exp().item(), rel=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{}, {"teacher_weight": 0.5, "accumulate": 2, "rdrop": 1.0, "ema": 0.8, "keep": "loss"}],
    ids=["alone", "with others"],
)
def test_a_resumed_run_is_exact(
    data: DataConfig,  # noqa: F811
    first: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it was interrupted between validations, with or without a run that it began with."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = {"updates": 24, "valid_every": 10, "average": 2, **settings}
    figures = tuned(whole, data, first, **settings).run()
    train_update = Trainer.train_update

    def interrupted(trainer: Trainer, batches: Iterator[Any]) -> dict[str, float]:
        if trainer.progress.update == 7:
            signal.raise_signal(signal.SIGINT)
        return train_update(trainer, batches)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Trainer, "train_update", interrupted)
        tuned(broken, data, first, **settings).run()
    assert open_checkpoint(broken).steps is not None
    assert resume_run(broken).run() == figures
    assert rows(broken) == rows(whole)
    assert snapshot(broken / "weights") == snapshot(whole / "weights")
    kept = [open_checkpoint(folder).header for folder in (whole, broken)]
    assert kept[0]["training"] == kept[1]["training"] and kept[0]["steps"] == kept[1]["steps"]


def test_from_random_weights(data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    """It needs no trained run; interrupted by the real command."""
    settings = {"updates": 14, "valid_every": 7, "average": 1, "quantize": "int8", "rdrop": 1.0}
    start(tmp_path / "whole", data, **settings).run()
    interrupt(tmp_path / "broken", data, 9, settings)
    resume_run(tmp_path / "broken").run()
    assert snapshot(tmp_path / "broken/weights") == snapshot(tmp_path / "whole/weights")


def test_without_it_nothing_changes() -> None:
    """One group of all parameters in their order, at the learning rate itself."""
    model = random_model(small_config())
    (group,) = parameter_groups(model)
    assert [id(each) for each in group["params"]] == [id(each) for each in model.parameters()]
    assert group["factor"] == 1 and TrainConfig().quantize == "none"
    assert not any(isinstance(module, RoundedLinear) for module in model.modules())
    assert learned_steps(model, Path("nowhere")) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--vocab-size", "50"], "--from gives the model and its vocabulary: leave out --vocab-size"),
        (["--tokenizer", "bpe"], "--from gives the model and its vocabulary: leave out --tokenizer"),
        (["--preset", "small"], "--from gives the model and its vocabulary: leave out --preset"),
        (["--set", "model.dropout=0.3"], "model.dropout is what the model of --from has: leave it out"),
        (["--resume"], "--resume takes everything but --updates from the run: leave out --task"),
        (
            ["--set", "train.quantize=int8", "--set", "train.precision=bf16"],
            "train.quantize=int8 computes in fp32: leave out train.precision=bf16",
        ),
    ],
)
def test_what_is_refused(first: Path, tmp_path: Path, options: list[str], words: str) -> None:
    line = failed_line(run_here("train", "--task", "copy", "--out", tmp_path / "run", "--from", first, *options))
    assert line == f"error: {words}" and not (tmp_path / "run").exists()


def test_other_runs_that_do_not_fit(data: DataConfig, first: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=r"--from .* is the folder that the run writes: name another with --out"):
        start_run(first, data, RunSettings("tiny", "", 0, {}, QUICK, start=tmp_path / ".." / first), force=True)
    other = write_checkpoint(tmp_path / "other", small_config())
    with pytest.raises(ConfigError, match=r"--teacher .* has another vocabulary than --from .*: leave one out"):
        start_run(tmp_path / "run", data, RunSettings("tiny", "", 0, {}, QUICK, other, first))
    with pytest.raises(ConfigError, match="src_sampling needs pieces of sentencepiece, which the given run has not"):
        tuned(tmp_path / "run", data, other, src_sampling=0.1)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_steps_alone_is_exported_so(tmp_path: Path) -> None:
    """Weights in the file beside steps are no parameters of the model."""
    model = quantized(random_model(small_config()))
    run = write_checkpoint(tmp_path / "run", model.config)
    save_tensors(run / "weights/average.safetensors", model_tensors(model))
    checkpoint = open_checkpoint(run)
    steps = learned_steps(model, run / "weights/average.safetensors")
    save_checkpoint(run, model.config, checkpoint.tokenizers, run / "weights/average.safetensors", {}, steps=steps)
    assert open_checkpoint(run).steps == steps and open_checkpoint(run).load_model().config == model.config


@pytest.mark.long
def test_two_processes_give_what_one_gives(data: DataConfig, first: Path, tmp_path: Path) -> None:  # noqa: F811
    settings = {"updates": 20, "valid_every": 10, "average": 2, "lr": 0.002, "quantize": "int8"}
    files = ["--src", data.src, "--tgt", data.tgt, "--valid-src", data.valid_src, "--valid-tgt", data.valid_tgt]
    sets = [x for key, value in {**QUICK, **settings}.items() for x in ("--set", f"train.{key}={value}")]
    process = launch("train", "--out", tmp_path / "two", "--from", first, *files, *sets, module=TORCHRUN)
    tuned(tmp_path / "one", data, first, accumulate=2, **settings).run()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = [[row["valid_loss"] for row in rows(tmp_path / name, "valid_loss")] for name in ("one", "two")]
    assert len(found[0]) == 3 and found[1] == pytest.approx(found[0], rel=1e-3)
    one, two = (open_checkpoint(tmp_path / name).steps for name in ("one", "two"))
    assert one is not None and two is not None and one.inputs == pytest.approx(dict(two.inputs), rel=1e-2)


@pytest.mark.long
def test_from_training_to_a_checked_program(tmp_path: Path) -> None:
    pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
    model = {**NO_DROPOUT, "d_model": 64, "d_ff": 64, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    rates = ["train.lr=0.005", "train.warmup=60", "train.valid_every=70", "train.average=3", "train.bleu_sentences=20"]
    common = ["--task", "copy", "--batch-tokens", "384", "--json"]
    sets = [x for s in [*(f"model.{k}={v}" for k, v in model.items()), *rates] for x in ("--set", s)]
    done = run_here("train", "--out", tmp_path / "fp32", "--updates", 350, *common, *sets)
    assert done.returncode == 0, done.stderr
    rates = ["train.lr=0.001", "train.warmup=10", "train.valid_every=20", "train.bleu_sentences=0"]
    sets = [x for s in [*rates, "train.quantize=int8"] for x in ("--set", s)]
    done = run_here("train", "--out", tmp_path / "int8", "--updates", 40, "--from", tmp_path / "fp32", *common, *sets)
    assert done.returncode == 0 and json.loads(done.stdout)["exact_match"] >= 0.9, done.stderr
    recipes = ["--recipe", "fp32", "--recipe", TRAINED]
    done = run_here("export", tmp_path / "int8", "--out", tmp_path / "bundle", *recipes)
    assert done.returncode == 0, done.stderr
    assert run_here("check", tmp_path / "bundle", "--backend", f"native:{TRAINED}").returncode == 0
    steps = open_checkpoint(tmp_path / "int8").steps
    assert trained_scales_off(open_bundle(tmp_path / "bundle").measured(TRAINED), steps) == []
