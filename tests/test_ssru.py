"""Decoders whose self-attention is an SSRU cell: one vector of state a layer, in every engine that can have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.plans import Profile
from tformer_deploy.decoding import Batch, ContinuousBatch, DecodeOptions, Hypothesis, decode
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import Request
from tformer_deploy.export.build import build
from tformer_deploy.export.checked import export_checked
from tformer_deploy.export.layouts.written import write_layout
from tformer_deploy.export.trt_builder import BuildOptions
from tformer_deploy.model.seq2seq import GrowingCache, first_past
from tformer_deploy.model.ssru import Ssru

from .configs import SSRU
from .conftest import export_unchecked, random_model, random_sources, small_config, write_checkpoint, write_lines
from .cpp_library import ROOT
from .params import long_but
from .simulated_trt import SIMULATED, as_input, make_bundle, run_simulated

RECIPES = ("fp32", "fp32-cpu", "int8", "int8-latency", "int4", "trt")
PROGRAMS = ("fp32", "native-fp32", "native-bf16", "native-int8", "native-int4")


def ids_of(outputs: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[each.ids for each in best] for best in outputs]


def test_the_cell_is_its_recurrence() -> None:
    generator = torch.Generator().manual_seed(1)
    cell, x = Ssru(5), torch.randn(2, 7, 5, generator=generator)
    with torch.no_grad():
        state, found = torch.zeros(2, 5), cell(x)
        for t in range(7):
            gate = 1 / (1 + torch.exp(-(x[:, t] @ cell.forget.weight.T + cell.forget.bias)))
            state = gate * state + (1 - gate) * (x[:, t] @ cell.value.weight.T)
            torch.testing.assert_close(found[:, t], state.clamp(min=0))


def test_steps_are_what_all_positions_at_once_are() -> None:
    model = random_model(small_config(**SSRU)).eval()
    src_ids, lengths = (torch.from_numpy(each) for each in random_sources(3, 7))
    tgt_ids = torch.from_numpy(random_sources(3, 9, seed=2)[0]).long()
    with torch.no_grad():
        memory = model.encode(src_ids, lengths)
        whole = model.decode(memory, lengths, tgt_ids)
        past, cross = first_past(model.config, memory, 3), model.cross_keys_values(memory)
        for t in range(9):
            cache = GrowingCache(past)
            hidden = model.step(tgt_ids[:, t : t + 1], torch.tensor([t]), lengths, cross, cache)
            torch.testing.assert_close(hidden[:, 0], whole[:, t], rtol=1e-5, atol=1e-5)
            past = cache.present
    assert [[each.shape for each in kept] for kept in past] == [[(3, model.config.d_model)]] * len(model.decoder)


@pytest.mark.parametrize("recipes", long_but({"ort": RECIPES, "native": PROGRAMS}, "native"))
def test_every_engine_gives_eagers_tokens(recipes: tuple[str, ...], tmp_path: Path) -> None:
    if recipes == PROGRAMS:
        pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
    run, text = write_checkpoint(tmp_path / "run", small_config(**SSRU)), write_lines(tmp_path / "text")
    report = export_checked(run, tmp_path / "bundle", recipes, text)
    assert report.passed and len(report.engines) == len(recipes), str(report)
    assert all(each.constants and not each.constants.wrong for each in report.engines)


@pytest.mark.parametrize("name", ["ort", "ort:fp32-cpu"])
def test_layers_are_eagers(name: str, tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path / "run", small_config(**SSRU))
    bundle = open_bundle(export_unchecked(run, tmp_path / "bundle", ["fp32", "fp32-cpu"]))
    src_ids, lengths = random_sources(3, 7)
    with make_engine("eager", bundle, run) as eager, make_engine(name, bundle) as engine:
        read = [each.layers(src_ids, lengths, random_sources(3, 9, seed=2)[0]) for each in (eager, engine)]
    assert {"decoder.0.self_attention", "log_probs"} & {*read[1]} and {*read[1]} <= {*read[0]}
    for layer, values in read[1].items():
        np.testing.assert_allclose(values, read[0][layer], rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_sentences_are_decoded_alone_and_in_a_running_batch(tmp_path: Path) -> None:
    pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
    run = write_checkpoint(tmp_path / "run", small_config(**SSRU, max_positions=80))
    export_checked(run, tmp_path / "bundle", ["fp32", "fp32-cpu", "native-fp32", "trt"], write_lines(tmp_path / "text"))
    sources = [random_sources(2, width, seed=width) for width in (3, 9, 5, 6)]
    options = [DecodeOptions(beams=beams, max_tokens=tokens) for beams, tokens in ((1, 4), (3, 70), (1, 75), (3, 6))]
    bundle = open_bundle(tmp_path / "bundle")
    with make_engine("eager", bundle) as eager:
        wanted = [ids_of(decode(eager, Batch(*each), how)) for each, how in zip(sources, options, strict=True)]
    for name in ("ort", "ort:fp32-cpu", "ort:trt", "cpp", "cpp:fp32-cpu", "native:native-fp32"):
        with make_engine(name, bundle, threads=1) as engine:
            alone = [ids_of(decode(engine, Batch(*each), how)) for each, how in zip(sources, options, strict=True)]
            assert alone == wanted, name
            if not engine.admits:
                continue
            running = ContinuousBatch(engine)
            joined = []
            for each, how in zip(sources, options, strict=True):
                joined += running.add([Request(Batch(*each), how)])
                running.step()
                running.step()
            while any(search.running for search in joined):
                running.step()
            assert [ids_of(search.outputs()) for search in joined] == wanted, name


@pytest.mark.long
def test_plans(tmp_path: Path) -> None:
    """TensorRT for RTX builds them; on a simulated GPU they give eager's tokens, also after a move to larger ones."""
    run = write_checkpoint(tmp_path / "run", small_config(**SSRU))
    bundle = make_bundle(run, tmp_path / "bundle")
    (tmp_path / "text").write_bytes(as_input())
    for precision in ("fp32", "fp16"):
        words = ["check", bundle, "--backend", f"trt:{precision}", "--src", tmp_path / "text", "--max-tokens", 20]
        assert not run_simulated(*words).returncode, precision
        build(bundle, BuildOptions(precision, flavor="rtx"), [Profile(2, 3, 8, 16)], tmp_path / "text")
    code = f"""
from tformer_deploy import load
from tformer_deploy.decoding import Batch, ContinuousBatch, DecodeOptions, decode
from tformer_deploy.engines.base import Request
from tests.conftest import random_sources
with load({str(bundle)!r}, "trt", variant="fp32", max_tokens=24) as translator:
    engine = translator.engine
    options = [DecodeOptions(24, beams=beams, endless=True) for beams in (1, 4)]
    asked = list(zip([Batch(*random_sources(2, width)) for width in (3, 9)], options))
    alone = [decode(engine, *each) for each in asked]
    running, searches = ContinuousBatch(engine), []
    for each in asked:
        searches += running.add([Request(*each)])
        running.step()
        running.step()
    while running.searches:
        running.step()
    found = [[[best.ids for best in each] for each in search.outputs()] for search in searches]
    assert found == [[[best.ids for best in each] for each in outputs] for outputs in alone]
    assert translator.engine._devices[0].profile.beams == 5
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SIMULATED, ROOT)))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("layout", ["ctranslate2", "one-file", "optimum", "transformers-js"])
def test_layouts_without_the_cell_say_so(layout: str, tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path / "run", small_config(**SSRU))
    with pytest.raises(ConfigError, match=r"model\.decoder_cell=ssru"):
        write_layout(run, tmp_path / "out", layout)


def test_relative_positions_need_attention() -> None:
    with pytest.raises(ConfigError, match="use positions=sinusoidal"):
        small_config(decoder_cell="ssru", positions="relative")
