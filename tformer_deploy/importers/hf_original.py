"""transformers as the original of a Hugging Face folder."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.notes import note
from .hf_text import Text


class HfOriginal:
    """See `base.Original`."""

    def __init__(self, path: Path, text: Text, asked: Mapping[str, int], neutral: Mapping[str, Any]) -> None:
        """`asked`: what the user wants of `generate`; `neutral`: values for what the folder says and we leave out."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all there is; nothing is fetched
        import transformers

        logging: Any = transformers.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        loaded: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32)
        self.model = loaded.eval()
        self.name = f"{type(self.model).__name__} of transformers {transformers.__version__}"
        self._text, self._given = text, {**neutral, **asked}
        self._tokenizer = self._load_tokenizer(path, transformers)

    def _load_tokenizer(self, path: Path, transformers: Any) -> Any:
        languages = {"src_lang": self._text.src_lang, "tgt_lang": self._text.tgt_lang}
        given = {name: code.strip("_") if code.startswith("__") else code for name, code in languages.items() if code}
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **given)
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            said = " ".join(str(error).split())
            note(f"text is not compared: transformers cannot load the tokenizer: {said:.200}")
            return None
        if self.model.config.model_type == "fsmt":  # both sides get text that is already split
            tokenizer._tokenize = partial(tokenizer._tokenize, bypass_tokenizer=True)
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
        own = self.model.generation_config
        # A shortest length above the longest forbids the end there throughout; ours may end at the last token.
        limits = {"min_length": max_tokens, "min_new_tokens": max_tokens - 1}
        shortest = {name: most for name, most in limits.items() if (getattr(own, name) or 0) > most}
        own_longest = own.max_new_tokens or (own.max_length or 0) - 1
        longest = {} if 0 < own_longest <= max_tokens else {"max_new_tokens": max_tokens}
        given = {**self._given, "num_beams": beams, **longest, **shortest}
        found = self._generated(input_ids=src_ids, attention_mask=mask_of(src_ids, src_lengths), **given)
        ends = {*torch.tensor(own.eos_token_id).flatten().tolist()}
        outputs = []
        for row in found[:, 1:].tolist():
            end = next((i for i, token in enumerate(row) if token in ends), None)
            outputs.append(row[:end])
        return outputs

    def _generated(self, **given: Any) -> Tensor:
        """Without a cache where the model's own fails: T5's has as many layers as the encoder."""
        try:
            return self.model.generate(**given)  # type: ignore[no-any-return]
        except IndexError as error:
            if "use_cache" in self._given:
                raise
            self._given["use_cache"] = False
            note(
                f"outputs are compared with use_cache=False: the cache of {self.name} fails, IndexError: {error!s:.80}"
            )
            return self._generated(**given, use_cache=False)

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
