"""A tformer checkpoint as a CTranslate2 model whose tokens are the ids, as text: both sides get the same input.

Needs ctranslate2. `tformer export --layout ctranslate2` writes the same weights with real tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tformer_deploy.export.layouts.ctranslate2 import Names, save_models
from tformer_deploy.model.checkpoint import load_tensors, open_checkpoint


def convert(run: Path, out: Path) -> None:
    """Write CTranslate2 models of the checkpoint's weights to `out`: float32, and int8."""
    checkpoint = open_checkpoint(run)
    config = checkpoint.config
    weights = {name: tensor.numpy() for name, tensor in load_tensors(checkpoint.weights).items()}
    source, target = ([str(i) for i in range(size)] for size in (config.src_vocab, config.tgt_vocab))
    names = Names(source, target, "0", str(config.bos_id), str(config.eos_id), str(config.start_id))
    save_models(config, weights, names, out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
