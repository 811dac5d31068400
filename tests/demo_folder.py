"""The demo's model as a Hugging Face folder, for the README's first commands: `python -m tests.demo_folder RUN OUT`.

Layers of Pegasus (pre-norm, sinusoidal positions) behind Marian's tokenizer, whose vocabulary is a list of pieces.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sentencepiece
import torch
from safetensors.torch import save_file

from tformer_deploy.model.checkpoint import open_checkpoint

NAMES = {
    "attention.": "self_attn.",
    "attention_residual.norm": "self_attn_layer_norm",
    "cross.": "encoder_attn.",
    "cross_residual.norm": "encoder_attn_layer_norm",
    "ff.up": "fc1",
    "ff.down": "fc2",
    "ff_residual.norm": "final_layer_norm",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    ".out.": ".out_proj.",
    "src_embedding": "shared",
}


def name_of(ours: str) -> str:
    """What transformers calls a parameter of ours."""
    for side in ("encoder", "decoder"):
        ours = ours.replace(f"{side}_norm", f"{side}.layer_norm").replace(f"{side}.0", f"{side}.layers.0")
        ours = ours.replace(f"{side}.1", f"{side}.layers.1")
    for name, theirs in NAMES.items():
        ours = ours.replace(name, theirs)
    return f"model.{ours}"


def write_folder(run: Path, out: Path) -> None:
    """Write a demo's checkpoint in the format of `transformers`."""
    checkpoint = open_checkpoint(run)
    config, width = checkpoint.config, checkpoint.config.d_model
    # transformers has sines in the first half of a position, ours are in even columns: reorder the residual stream.
    order = torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2)))
    tensors = {"final_logits_bias": torch.zeros(1, config.tgt_vocab)}
    for ours, value in checkpoint.load_model().state_dict().items():
        if ours in ("tgt_embedding.weight", "output.weight"):  # tied
            continue
        if any(part in ours for part in (".out.", "ff.down", "norm")):
            value = value[order]
        elif value.ndim == 2:
            value = value[:, order]
        tensors[name_of(ours)] = value.contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    ids = {"pad_token_id": config.pad_id, "bos_token_id": config.bos_id, "eos_token_id": config.eos_id}
    ids["decoder_start_token_id"] = config.start_id
    sides = {
        f"{side}_{name}": value
        for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers))
        for name, value in (("layers", layers), ("attention_heads", config.heads), ("ffn_dim", config.d_ff))
    }
    model = {"model_type": "pegasus", "architectures": ["PegasusForConditionalGeneration"], "d_model": width}
    model |= {"vocab_size": config.tgt_vocab, "max_position_embeddings": config.max_positions}
    model |= {"activation_function": config.activation, "scale_embedding": config.scale_embeddings}
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(run / "tokenizer.model"))
    vocab = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    texts = {
        "config.json": {**model, **sides, **ids},
        "generation_config.json": {**ids, "num_beams": 4, "max_length": config.max_positions},
        "tokenizer_config.json": {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"},
        "vocab.json": vocab,
    }
    for name, content in texts.items():
        (out / name).write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
    for side in ("source", "target"):
        (out / f"{side}.spm").write_bytes((run / "tokenizer.model").read_bytes())


if __name__ == "__main__":
    write_folder(*map(Path, sys.argv[1:]))
