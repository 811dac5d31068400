"""A checkpoint of the `base` preset with random weights whose outputs end, most of them after 3 to 30 tokens."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from tformer_deploy.base.lines import read_lines
from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.model.checkpoint import model_tensors, save_checkpoint, save_tensors
from tformer_deploy.model.config import preset
from tformer_deploy.model.network import Transformer

VOCAB, MEAN_TOKENS, MOST_TOKENS, SAMPLES, LINES = 32000, 12.0, 32, 96, 300
"""Multi30K's German sentences have 11 words on average, and at most 30."""


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", type=Path, help="text whose lengths the lines to translate get")
    parser.add_argument("--lines", type=Path, help="file for those lines, of random words")
    options = parser.parse_args()
    if bool(options.like) != bool(options.lines):
        parser.error("--like and --lines belong together")
    if options.like:
        options.lines.write_text("".join(f"{line}\n" for line in random_lines(options.like)))
    out = options.out
    config = preset("base", VOCAB, VOCAB, {"output_bias": True, "share_embeddings": "none"})
    model = Transformer(config).init_weights(1).eval()
    model.output.weight.data[config.eos_id] *= 2  # its score varies more than that of others from step to step
    model.output.bias.data[config.eos_id] += bias_for(margins(model))
    words = Words([*SPECIALS, *(f"w{i}" for i in range(len(SPECIALS), VOCAB))], None)
    weights = out / "weights/random.safetensors"
    save_tensors(weights, model_tensors(model))
    save_checkpoint(out, config, Tokenizers(words, words), weights, {"seed": 1, "updates": 0})


def random_lines(like: Path) -> list[str]:
    """Random words, as many in each line as in the first lines of a text."""
    rng = np.random.default_rng(3)
    counts = [len(line.split()) for line in read_lines(like)[:LINES]]
    return [" ".join(f"w{word}" for word in rng.integers(len(SPECIALS), VOCAB, count)) for count in counts]


def margins(model: Transformer) -> np.ndarray:
    """How far the end token's score is below the best at each step of greedy search (MOST_TOKENS, SAMPLES)."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(6, 22, SAMPLES).astype(np.int32)
    sources = rng.integers(len(SPECIALS), VOCAB, (SAMPLES, 21)).astype(np.int32)
    for row, length in zip(sources, lengths, strict=True):
        row[length - 1], row[length:] = model.config.eos_id, model.config.pad_id
    found = []
    with EagerEngine(model) as engine, torch.inference_mode():
        state, tokens = engine.encode(sources, lengths), np.full((SAMPLES, 1), model.config.start_id, np.int32)
        for _ in range(MOST_TOKENS):
            every = engine.step(tokens, state, full=True).log_probs
            assert every is not None
            scores = every[:, 0].copy()
            end = scores[:, model.config.eos_id].copy()
            scores[:, model.config.eos_id] = -np.inf
            found.append(scores.max(1) - end)
            tokens = scores.argmax(1).astype(np.int32)[:, None]
            engine.reorder(state, np.arange(SAMPLES, dtype=np.int32)[:, None])
    return np.array(found)


def bias_for(margins: np.ndarray) -> float:
    """What the end token's score needs for outputs of MEAN_TOKENS on average."""
    candidates = np.quantile(margins, np.linspace(0, 0.5, 501))
    ends = [np.where((margins < each).any(0), (margins < each).argmax(0), MOST_TOKENS).mean() for each in candidates]
    return float(candidates[np.abs(np.array(ends) - MEAN_TOKENS).argmin()])


if __name__ == "__main__":
    main()
