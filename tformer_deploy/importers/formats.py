"""The formats of other tools, and the options of each. Imports nothing heavy: the command's help lists them."""

from __future__ import annotations

FORMATS = {
    "hf": "a Hugging Face folder: Marian, M2M100, NLLB, Pegasus, Blenderbot, FSMT, BART, mBART, PLBart, T5, mT5, UMT5",
    "annotated": "a state dict of The Annotated Transformer and its relatives",
    "multi30k-tutorial": "a checkpoint of LZHMS/TransformerPractice",
    "torch": "a state dict of a module around torch.nn.Transformer",
    "pytorch-seq2seq": "a state dict of bentrevett/pytorch-seq2seq",
    "ctranslate2": "a folder with CTranslate2's model.bin",
    "opennmt-py": "a .pt file of OpenNMT-py 3",
    "joeynmt": "a .ckpt file of JoeyNMT",
    "sockeye": "a folder of Sockeye 3",
    "marian": "an .npz file of Marian",
    "fairseq": "a .pt file of fairseq's translation task",
}
"""Each has a module of its name, with `recognises(seen)` and `read(path, options)`."""
VOCABULARIES = ("vocab", "src_vocab", "tgt_vocab")
TUTORIAL = (*VOCABULARIES, "split_regex", "language", "lower", "heads", "model")
TOOLKIT = ("src_codes", "tgt_codes", "lower", "model")
OPTIONS: dict[str, tuple[str, ...]] = {
    "hf": ("src_lang", "tgt_lang", "model"),
    "annotated": TUTORIAL,
    "multi30k-tutorial": TUTORIAL,
    "torch": (*TUTORIAL, "parts"),
    "pytorch-seq2seq": TUTORIAL,
    "ctranslate2": (*TOOLKIT, "src_lang", "tgt_lang"),
    "opennmt-py": TOOLKIT,
    "joeynmt": (*VOCABULARIES, *TOOLKIT),
    "sockeye": TOOLKIT,
    "marian": (*VOCABULARIES, *TOOLKIT),
    "fairseq": (*VOCABULARIES, *TOOLKIT),
}
"""Fields of ImportOptions that each format reads; others are refused."""
