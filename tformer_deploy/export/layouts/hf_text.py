"""A model's tokenizers in a folder of Hugging Face's layout: the original's files, or ours as such."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...base.files import write_json
from ...importers.weights import read_json_file
from .hf_config import original_folder
from .hf_tokenizer import write_tokenizers
from .layout import Source

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "target_vocab.json", "merges.txt", "vocab-src.json", "vocab-tgt.json"),
    *("source.spm", "target.spm", "spiece.model", "sentencepiece.bpe.model"),
)
GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""What transformers 5 and 4 call a tokenizer that is all in its tokenizer.json."""


def write_text(source: Source, folder: Path, marian: bool) -> None:
    """Write tokenizer files. `marian`: those of MarianTokenizer do, else there must be a tokenizer.json."""
    original = original_folder(source)
    if original is None or not (marian or (original / "tokenizer.json").is_file()):
        write_tokenizers(source.tokenizers, folder, marian)
        return
    for name in FILES:
        if (original / name).is_file():
            shutil.copyfile(original / name, folder / name)
    path = folder / "tokenizer_config.json"
    settings = read_json_file(path) if path.is_file() else {}
    if settings.get("tokenizer_class") == GENERIC[0]:
        write_json(path, {**settings, "tokenizer_class": GENERIC[1]})
