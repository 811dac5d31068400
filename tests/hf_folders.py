"""Folders of Hugging Face models, tiny and random, with tokenizers learned from a few sentences."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers loads: random weights, nothing is fetched

import sentencepiece
import torch
import transformers

SENTENCES = [
    "Two young, white males are outside near many bushes.",
    "Several men in hard hats are operating a giant pulley system.",
    "A little girl climbing into a wooden playhouse.",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    "Mehrere Männer mit Schutzhelmen bedienen ein Antriebsradsystem.",
    "Ein kleines Mädchen klettert in ein Spielhaus aus Holz.",
    "Ein Mann in einem blauen Hemd steht auf einer Leiter und putzt ein Fenster.",
]
WORDS = " ".join(SENTENCES).split()
LINES = [*SENTENCES, *(" ".join(random.Random(i).choices(WORDS, k=1 + i % 8)) for i in range(492))]
SIZES: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 80,
}
VOCAB = 150
NORMS = ("final_layer_norm", "layer_norm")
"""Names of a decoder's last norm, where it does not belong to a layer."""


def pieces(**how: Any) -> bytes:
    """A sentencepiece model."""
    model = io.BytesIO()
    how = {"vocab_size": VOCAB, "model_type": "unigram", "hard_vocab_limit": False, "minloglevel": 2, **how}
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=iter(SENTENCES), model_writer=model, **how)
    return model.getvalue()


def entries(model: bytes) -> list[str]:
    """The pieces of a model."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


def random_weights(
    model: Any, tables: float = 1.0, layers: float = 1.0, seed: int = 1, loud: float = 1.5, used: int = 0
) -> Any:
    """Larger ones than a new model's, so that outputs differ; the end is likely enough to be met.

    `loud`: scales the end token's row of the output, in models that have no bias for it. `used`: rows
    behind so many are zeros, as those of padding are: they have no text.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "embed_positions" in name and not parameter.requires_grad:
            continue
        if parameter.ndim > 1:
            scale = tables if "shared" in name or "embed_" in name else layers * parameter.shape[1] ** -0.5
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
        else:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0
            module.weight.data[used or len(module.weight) :] = 0
    flip_last_norm(model, generator)
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None:
        bias += 0.5 * torch.randn(bias.shape, generator=generator)
        bias[0, model.config.eos_token_id] += 2.0
        # transformers counts the start among the n-grams of an output, we do not: the two differ where it is produced.
        bos = getattr(model.config, "bos_token_id", None)
        if bos is not None and bos != model.config.eos_token_id:
            bias[0, bos] -= 20.0
    else:
        model.get_output_embeddings().weight.data[model.config.eos_token_id] *= loud
    return model.eval()


def flip_last_norm(model: Any, generator: torch.Generator) -> None:
    """Signs of what the output reads: where it is the table of embeddings too, every token was followed by itself."""
    decoder = model.get_decoder()
    norm = next((found for name in NORMS if (found := getattr(decoder, name, None)) is not None), None)
    norm = decoder.layers[-1].final_layer_norm if norm is None else norm
    norm.weight.data *= torch.randn(norm.weight.shape, generator=generator).sign()


def write(path: Path, model: Any, files: dict[str, Any], **scales: Any) -> Path:
    """A model's folder with other files beside it."""
    random_weights(model, **scales).save_pretrained(path)
    for name, content in files.items():
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            (path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def marian(path: Path, **more: Any) -> Path:
    """One vocabulary for both sides, two models; eos 0, the start is pad; a language that a source may ask for."""
    models = [pieces(vocab_size=size, pad_id=-1, bos_id=-1, eos_id=1, unk_id=0) for size in (VOCAB, VOCAB - 20)]
    words = dict.fromkeys(["</s>", "<unk>", *entries(models[0]), *entries(models[1]), ">>deu<<", ">>fra<<"])
    vocab = {word: i for i, word in enumerate([*words, "<pad>"])}
    pad = vocab["<pad>"]
    ids = {"pad_token_id": pad, "eos_token_id": 0, "bos_token_id": 0, "decoder_start_token_id": pad}
    how = {"bad_words_ids": [[pad]], "num_beams": 4, "forced_eos_token_id": 0, "max_length": 60}
    config = transformers.MarianConfig(
        **SIZES, **ids, vocab_size=len(vocab), activation_function="swish", scale_embedding=True, **more
    )
    model = transformers.MarianMTModel(config)
    model.generation_config = transformers.GenerationConfig(**ids, **how)
    tokenizer = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"}
    files = {"source.spm": models[0], "target.spm": models[1], "vocab.json": vocab, "tokenizer_config.json": tokenizer}
    return write(path, model, files, tables=0.5, layers=0.8)


def bart(path: Path) -> Path:
    """Byte-level BPE."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(SENTENCES, vocab_size=400, special_tokens=specials, show_progress=False)
    path.mkdir(parents=True)
    tokenizer.save_model(str(path))
    vocab = json.loads((path / "vocab.json").read_text())
    vocab["<mask>"] = len(vocab)
    config = transformers.BartConfig(
        **SIZES,
        vocab_size=len(vocab),
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_bos_token_id=0,
        activation_function="gelu",
    )
    model = transformers.BartForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_bos_token_id=0,
        forced_eos_token_id=2,
        num_beams=4,
        early_stopping=True,
        length_penalty=2.0,
        min_length=8,
        max_length=40,
        no_repeat_ngram_size=3,
    )
    return write(path, model, {"vocab.json": vocab, "tokenizer_config.json": {"tokenizer_class": "BartTokenizer"}})


def fairseq_pieces() -> bytes:
    """The order of special tokens that models of fairseq have."""
    return pieces(unk_id=0, bos_id=1, eos_id=2, pad_id=-1)


def of_bart(kind: str, vocab: int, start: int, **how: Any) -> Any:
    """A model with the names of BART's relatives, pad 1, bos 0, eos 2."""
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": start}
    settings = how.pop("settings", {"num_beams": 5, "max_length": 40})
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "vocab_size": vocab, **ids, **how})
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    model.generation_config = transformers.GenerationConfig(**ids, **settings)
    return model


def m2m_100(path: Path) -> Path:
    """A vocabulary, 100 languages behind it; pre-norm, fairseq's sines."""
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

    model = pieces(unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    vocab = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *entries(model)[3:]])}
    languages = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    made = of_bart("M2M100", len(vocab) + len(languages) + 8, 2, activation_function="relu", scale_embedding=True)
    files = {
        "sentencepiece.bpe.model": model,
        "vocab.json": vocab,
        "special_tokens_map.json": {"additional_special_tokens": languages},
        "tokenizer_config.json": {"tokenizer_class": "M2M100Tokenizer"},
    }
    scales = {"tables": 0.3, "layers": 1.6, "loud": 2.5}
    return write(path, made, files, used=len(vocab) + len(languages), **scales)


def mbart(path: Path) -> Path:
    """The language's code ends a source and begins the decoder's input; a norm of embeddings."""
    from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES

    model = fairseq_pieces()
    vocab = ["<s>", "<pad>", "</s>", "<unk>", *entries(model)[3:]]
    codes = {code: len(vocab) + i for i, code in enumerate(FAIRSEQ_LANGUAGE_CODES)}
    added = {str(i): {"content": code, "special": True} for code, i in codes.items()}
    added[str(len(vocab) + len(codes))] = {"content": "<mask>", "special": True}
    made = of_bart(
        "MBart", len(vocab) + len(codes) + 1, codes["de_DE"], activation_function="gelu", scale_embedding=True
    )
    files = {
        "sentencepiece.bpe.model": model,
        "tokenizer_config.json": {"tokenizer_class": "MBartTokenizer", "added_tokens_decoder": added},
    }
    return write(path, made, files, tables=0.3)


def pegasus(path: Path) -> Path:
    """Pieces behind 103 special tokens."""
    model = pieces(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    size = len(entries(model)) + 103
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = transformers.PegasusConfig(
        **SIZES, **ids, vocab_size=size, activation_function="relu", scale_embedding=True
    )
    made = transformers.PegasusForConditionalGeneration(config)
    made.generation_config = transformers.GenerationConfig(
        **ids, num_beams=8, length_penalty=0.8, max_length=40, forced_eos_token_id=1
    )
    files = {"spiece.model": model, "tokenizer_config.json": {"tokenizer_class": "PegasusTokenizer"}}
    return write(path, made, files, layers=1.6)


def blenderbot(path: Path) -> Path:
    """Byte-level BPE of texts that begin with a space; pre-norm, learned positions without an offset."""
    bart(path)
    vocab = json.loads((path / "vocab.json").read_text())
    merges = (path / "merges.txt").read_text()
    for file in path.iterdir():
        file.unlink()
    settings = {"num_beams": 10, "min_length": 5, "max_length": 30, "length_penalty": 0.65, "no_repeat_ngram_size": 3}
    made = of_bart("Blenderbot", len(vocab), 0, activation_function="gelu", scale_embedding=True, settings=settings)
    rules = [tuple(line.split(" ")) for line in merges.split("\n")[1:] if line]
    tokenizer = transformers.BlenderbotTokenizer(vocab=vocab, merges=rules)
    # Which published folders have in their tokenizer.json.
    from tokenizers.processors import TemplateProcessing

    tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    write(path, made, {"vocab.json": vocab, "merges.txt": merges})
    tokenizer.save_pretrained(path)
    return path


def plbart(path: Path) -> Path:
    """Codes of programming languages behind a source."""
    model = fairseq_pieces()
    size = len(entries(model)) + 1
    codes = ["__java__", "__python__", "__en_XX__"]
    added = {str(size + i): {"content": code, "special": True} for i, code in enumerate(codes)}
    added[str(size + len(codes))] = {"content": "<mask>", "special": True}
    made = of_bart("PLBart", size + len(codes) + 1, size + 1, activation_function="gelu", scale_embedding=True)
    files = {
        "sentencepiece.bpe.model": model,
        "tokenizer_config.json": {
            "tokenizer_class": "PLBartTokenizer",
            "language_codes": "base",
            "added_tokens_decoder": added,
        },
    }
    return write(path, made, files)


def fsmt(path: Path) -> Path:
    """Two vocabularies of BPE pieces that end in </w>; odd rules on positions."""
    merges = ["t h", "th e</w>", "i n</w>", "a n", "e r</w>", "i n", "in g</w>"]
    letters = sorted({letter for sentence in SENTENCES for letter in sentence if letter != " "})
    pairs = [rule.replace(" ", "") for rule in merges]
    words = ["<s>", "<pad>", "</s>", "<unk>", *letters, *(f"{letter}</w>" for letter in letters), *pairs]
    sides = {"src": words, "tgt": [*words[:4], *reversed(words[4:]), "another</w>"]}
    config = transformers.FSMTConfig(
        langs=["en", "de"],
        src_vocab_size=len(sides["src"]),
        tgt_vocab_size=len(sides["tgt"]),
        **SIZES,
        activation_function="relu",
        num_beams=5,
        max_length=40,
    )
    files = {f"vocab-{side}.json": {word: i for i, word in enumerate(each)} for side, each in sides.items()}
    merged = "".join(f"{rule} 1\n" for rule in merges)
    tokenizer = {"tokenizer_class": "FSMTTokenizer", "langs": ["en", "de"], "tgt_vocab_size": len(sides["tgt"])}
    model = transformers.FSMTForConditionalGeneration(config)
    files |= {"merges.txt": merged, "tokenizer_config.json": tokenizer}
    return write(path, model, files, tables=0.3, layers=2.0)  # so that padding, whose score is 0, is never best


def of_t5(path: Path, kind: str, **how: Any) -> Path:
    """T5 and its relatives: pad 0, eos 1, unk 2, the start is pad."""
    model = pieces(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    size = len(entries(model))
    extra = {str(size + i): {"content": f"<extra_id_{9 - i}>", "special": True} for i in range(10)}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    how = {"num_layers": 3, "num_decoder_layers": 2, "d_model": 32, "d_kv": 12, **how}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=size + 14,
        d_ff=48,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        **ids,
        **how,
    )
    made = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    made.generation_config = transformers.GenerationConfig(**ids, num_beams=4, max_length=30)
    tokenizer = {"tokenizer_class": "T5Tokenizer", "extra_ids": 10, "added_tokens_decoder": extra}
    files = {"spiece.model": model, "tokenizer_config.json": tokenizer}
    tied = kind in ("T5", "UMT5") and "tie_word_embeddings" not in how
    scales = (
        {"tables": 0.6, "layers": 1.0, "loud": 3.5 if kind == "T5" else 1.0}
        if tied
        else {"tables": 0.5, "layers": 0.25}
    )
    return write(path, made, files, **scales)


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "marian": marian,
    "marian, one language": lambda path: marian(path, tie_word_embeddings=True),
    "m2m_100": m2m_100,
    "mbart": mbart,
    "plbart": plbart,
    "pegasus": pegasus,
    "bart": bart,
    "blenderbot": blenderbot,
    "fsmt": fsmt,
    "t5": lambda path: of_t5(path, "T5"),
    "flan-t5": lambda path: of_t5(path, "T5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": lambda path: of_t5(path, "MT5"),
    "umt5": lambda path: of_t5(path, "UMT5"),
}
OPTIONS: dict[str, dict[str, str]] = {
    "marian": {"tgt_lang": "fra"},
    "m2m_100": {"src_lang": "en", "tgt_lang": "de"},
    "mbart": {"src_lang": "en_XX", "tgt_lang": "de_DE"},
    "plbart": {"src_lang": "java", "tgt_lang": "python"},
}
