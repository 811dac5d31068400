"""Tokenizer files beside a model, for programs that split text before a runtime and join it after."""

from __future__ import annotations

import json
from pathlib import Path

from ...base.files import atomic_file, write_json
from ...bundle.text import ByteBpe, Tokenizers, WordBpe


def write_tokenizers(tokenizers: Tokenizers, folder: Path) -> None:
    """Write `tokenizer.*`, or `source.*` and `target.*`.

    A .model is sentencepiece's. Byte-pair encoding gets files of the programs that apply it as well: .codes for
    subword-nmt, and .vocab.json with .merges.txt for the tokenizers of GPT-2 and BART.
    """
    description = tokenizers.save(folder)
    for side in ("source", "target"):
        own = description[side]
        kind, file = own.get("of", own["kind"]), folder / own["file"]
        if kind not in (WordBpe.kind, ByteBpe.kind):
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        rules = "".join(f"{rule}\n" for rule in found["merges"])
        if kind == ByteBpe.kind:
            write_json(file.with_suffix(".vocab.json"), {entry: i for i, entry in enumerate(found["entries"])})
        name = ".codes" if kind == WordBpe.kind else ".merges.txt"
        with atomic_file(file.with_suffix(name)) as temporary:
            temporary.write_text(f"#version: 0.2\n{rules}", encoding="utf-8")
