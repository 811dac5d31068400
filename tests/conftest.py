"""What several tests share: a small random model, its checkpoint and its bundle."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads: two test processes share two cores
# Some virtual machines announce AMX and kill who uses it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import pytest
from numpy.typing import NDArray

from tformer_deploy.checkpoint import model_tensors, save_checkpoint, save_tensors
from tformer_deploy.config import ModelConfig
from tformer_deploy.model import Transformer
from tformer_deploy.ship import ship
from tformer_deploy.text import SPECIALS, Tokenizers, Words

VOCAB = 60


def small_config(**changes: object) -> ModelConfig:
    """Two layers a side, four heads, 24 positions."""
    values: dict[str, object] = {
        "src_vocab": VOCAB,
        "tgt_vocab": VOCAB,
        "d_model": 32,
        "d_ff": 48,
        "heads": 4,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "max_positions": 24,
    }
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


def write_checkpoint(directory: Path, config: ModelConfig, seed: int = 1) -> Path:
    """A checkpoint of random weights whose words are w4, w5 and so on; biases are random too, so that all count."""
    model = Transformer(config).init_weights(seed)
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data += parameter.new_tensor(rng.normal(0, 0.1, parameter.shape))
    words = Words([*SPECIALS, *(f"w{i}" for i in range(4, config.src_vocab))], None)
    weights = directory / "weights/random.safetensors"
    save_tensors(weights, model_tensors(model))
    save_checkpoint(directory, config, Tokenizers(words, words), weights, {})
    return directory


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the small model."""
    return write_checkpoint(tmp_path_factory.mktemp("run") / "run", small_config())


@pytest.fixture(scope="session")
def bundle(run: Path) -> Path:
    """Its exported and checked bundle. Read only: copy it to change it."""
    out = run.parent / "bundle"
    ship(run, out)
    return out


@pytest.fixture(scope="session")
def attention_bundle(run: Path) -> Path:
    """The same model exported with its cross-attention. Read only."""
    out = run.parent / "attention-bundle"
    ship(run, out, ["fp32-attention"])
    return out


def random_sources(batch: int, width: int, seed: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Ids (B, S) padded with 1 and lengths (B), the first row full."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, width + 1, batch).astype(np.int32)
    lengths[0] = width
    ids = rng.integers(4, VOCAB, (batch, width)).astype(np.int32)
    ids[np.arange(width) >= lengths[:, None]] = 1
    return ids, lengths
