"""transformers as the original of a Hugging Face folder."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..notes import note
from .hf_generation import neutral_settings
from .hf_text import Text


class HfOriginal:
    """See `base.Original`."""

    def __init__(self, path: Path, text: Text, settings: Mapping[str, Any]) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all there is; nothing is fetched
        import transformers

        logging: Any = transformers.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        generation: Any = transformers.GenerationConfig
        own_file = (path / "generation_config.json").is_file()
        compared = {"_from_model_config": not own_file, **settings, **neutral_settings(settings, text.specials.eos)}
        loaded: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            path, dtype=torch.float32, generation_config=generation.from_dict(compared)
        )
        self.model = loaded.eval()
        self.name = f"{type(self.model).__name__} of transformers {transformers.__version__}"
        self._text, self._settings = text, settings
        self._tokenizer = self._load_tokenizer(path, transformers)

    def _load_tokenizer(self, path: Path, transformers: Any) -> Any:
        languages = {"src_lang": self._text.src_lang, "tgt_lang": self._text.tgt_lang}
        given = {name: code.strip("_") if code.startswith("__") else code for name, code in languages.items() if code}
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **given)
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            note(f"text is not compared: transformers cannot load the tokenizer: {error!s:.200}")
            return None
        tokenizer.clean_up_tokenization_spaces = False  # PLBart's takes spaces from before punctuation
        return tokenizer

    def in_double(self) -> HfOriginal:
        """See `base.Original`."""
        exact = copy.copy(self)
        exact.model = copy.deepcopy(self.model).double()
        return exact

    def memory(self, src_ids: Tensor, src_lengths: Tensor) -> Tensor:
        """See `base.Original`."""
        found = self.model.get_encoder()(input_ids=src_ids, attention_mask=mask_of(src_ids, src_lengths))
        return found.last_hidden_state  # type: ignore[no-any-return]

    def log_probs(self, src_ids: Tensor, src_lengths: Tensor, tgt_ids: Tensor) -> Tensor:
        """See `base.Original`."""
        mask = mask_of(src_ids, src_lengths)
        logits = self.model(input_ids=src_ids, attention_mask=mask, decoder_input_ids=tgt_ids, use_cache=False).logits
        return logits.log_softmax(-1)  # type: ignore[no-any-return]

    def generate(self, src_ids: Tensor, src_lengths: Tensor, beams: int, max_tokens: int) -> list[list[int]]:
        """See `base.Original`."""
        first = {"forced_bos_token_id": self._text.first_ids[0]} if self._text.first_ids else {}
        # A shortest length above the longest forbids the end there throughout; ours may end at the last token.
        limits = {"min_length": max_tokens, "min_new_tokens": max_tokens - 1}
        shortest = {name: min(self._settings[name], most) for name, most in limits.items() if self._settings.get(name)}
        found = self.model.generate(
            input_ids=src_ids,
            attention_mask=mask_of(src_ids, src_lengths),
            num_beams=beams,
            max_new_tokens=max_tokens,
            decoder_start_token_id=self._text.start_id,
            **first,
            **shortest,
        )
        ends = self._settings.get("eos_token_id")
        ends = {*ends} if isinstance(ends, list) else {self._text.specials.eos}
        outputs = []
        for row in found[:, 1:].tolist():
            end = next((i for i, token in enumerate(row) if token in ends), None)
            outputs.append(row[:end])
        return outputs

    def source_ids(self, text: str) -> list[int] | None:
        """See `base.Original`."""
        return None if self._tokenizer is None else list(self._tokenizer(self._text.before + text).input_ids)

    def text(self, ids: list[int]) -> str | None:
        """See `base.Original`."""
        if self._tokenizer is None or self.model.config.model_type == "fsmt":  # whose words sacremoses joins again
            return None
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def mask_of(src_ids: Tensor, src_lengths: Tensor) -> Tensor:
    """(B, S), 1 where a token is."""
    return (torch.arange(src_ids.shape[1]) < src_lengths[:, None]).long()
