"""Tokenizers, made from their description in a header: sentencepiece, lists of pieces, byte-pair encoding, words."""

from .base import OUR_SPECIALS, SPECIALS, Specials, Tokenizer
from .bpe import ByteBpe, WordBpe
from .pieces import PieceList, SentencePiece
from .sides import Tokenizers, load_tokenizers, require_fit, tokenizer_files, train_tokenizers
from .words import Words
from .wrapped import AddedToken, Around, Wrapped

__all__ = [
    "OUR_SPECIALS",
    "SPECIALS",
    "AddedToken",
    "Around",
    "ByteBpe",
    "PieceList",
    "SentencePiece",
    "Specials",
    "Tokenizer",
    "Tokenizers",
    "WordBpe",
    "Words",
    "Wrapped",
    "load_tokenizers",
    "require_fit",
    "tokenizer_files",
    "train_tokenizers",
]
