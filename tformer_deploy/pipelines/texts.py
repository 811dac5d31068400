"""`pipeline`: texts in, records out, as the pipelines that transformers 5 no longer has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import ConfigError, DataError
from ..bundle.text import Tokenizers, Wrapped
from ..decoding import Hypothesis
from ..model.config import BATCH_TOKENS
from ..translate.batches import length_batches, make_batch
from .arguments import Plan, known_settings
from .model import Opening, TformerForSeq2SeqLM, sequences_of

NAMES = {"translation": "translation", "summarization": "summary", "text2text-generation": "generated"}
"""How the keys of a task's records begin."""
LANGUAGES = re.compile("translation_([^_]+)_to_([^_]+)")
OWN = {"max_new_tokens": 256, "num_beams": 4}
"""transformers' defaults for pipelines. Its beam comes before the model's, its length after it."""
TEXT = (
    "return_tensors",
    "return_text",
    "return_type",
    "clean_up_tokenization_spaces",
    "truncation",
    "batch_size",
    "src_lang",
    "tgt_lang",
)
"""Arguments of a call that are not `generate`'s."""
CUTS = {True: True, "longest_first": True, "only_first": True, None: False, False: False, "do_not_truncate": False}
CODE = re.compile(">>.*?<<", re.DOTALL)
"""A target language that begins a text, as transformers' MarianTokenizer finds it."""


def pipeline(task: str, model: str | Path = "", **how: Any) -> Pipeline:
    """A pipeline of a Hugging Face folder, which is exported on first use, or of a bundle.

    `task`: "translation", "translation_XX_to_YY", "summarization" or "text2text-generation". `how`: `backend`,
    `variant`, `threads`, `device` and `compare` as `TformerForSeq2SeqLM.from_pretrained` has them, and everything that
    a call takes, as its default. Raises TformerError.
    """
    found = LANGUAGES.fullmatch(task)
    kind = "translation" if found else task
    if kind not in NAMES:
        raise ConfigError(
            f"task '{task}': must be translation, translation_XX_to_YY, summarization or text2text-generation"
        )
    if not str(model):
        raise ConfigError("pipeline: give model=FOLDER, a Hugging Face folder or a bundle: none is fetched")
    tokenizer = how.pop("tokenizer", None)
    if tokenizer is not None and str(tokenizer) != str(model):
        raise ConfigError("tokenizer: the model's own is used: leave it out, or give the model's folder")
    if how.pop("framework", "pt") != "pt":
        raise ConfigError("framework: there is no TensorFlow here: leave it out")
    own = {name: how.pop(name) for name in ("backend", "variant", "threads", "device", "compare") if name in how}
    if own.get("device") in (None, -1):
        own.pop("device", None)
    if found and not {"src_lang", "tgt_lang"} & how.keys():
        how |= {"src_lang": found[1], "tgt_lang": found[2]}
    return Pipeline(task, NAMES[kind], Opening(Path(model), **own), how)


class Pipeline:
    """Calls turn a text, a list of texts or an iterator of texts into records. Close it, or use `with`."""

    def __init__(self, task: str, name: str, opening: Opening, given: Mapping[str, Any]) -> None:
        self.task, self.name, self.opening = task, name, opening
        self.given = dict(given)
        self._models: dict[tuple[str, str], TformerForSeq2SeqLM] = {}
        self.model = self._model(self.given.get("src_lang") or "", self.given.get("tgt_lang") or "")
        config = self.model.prepared.config if self.model.prepared else {}
        tasks = config.get("task_specific_params") or {}
        own = dict(tasks.get(task) or {})
        self.prefix = str(own.pop("prefix", config.get("prefix") or ""))
        self.defaults = {**_defaults(self.model), **known_settings(own)}
        self.model.plan({**self.defaults, **_generating(self.given)})

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the engines' devices."""
        for model in {id(each): each for each in self._models.values()}.values():
            model.close()

    def __call__(self, texts: str | Iterable[str], **given: Any) -> Any:
        """Records of a text; of a list, one of each text, or a list of each where several are returned.

        Of another iterable, an iterator over the records of each text.
        """
        asked = {**self.given, **given}
        if isinstance(texts, str):
            return self._records([texts], asked)[0]
        if not isinstance(texts, list | tuple):
            return (self._records([_text(text)], asked)[0] for text in texts)
        found = self._records([_text(text) for text in texts], asked)
        return [each[0] for each in found] if all(len(each) == 1 for each in found) else found

    def _records(self, texts: list[str], asked: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Of each text its records."""
        model = self._model(asked.get("src_lang") or "", asked.get("tgt_lang") or "")
        return self._of_pair(model, texts, asked) if texts else []

    def _of_pair(self, model: TformerForSeq2SeqLM, texts: list[str], asked: dict[str, Any]) -> list[Any]:
        """Records of texts of one pair of languages."""
        tokenizers = model.translator.tokenizers
        arguments = {**self.defaults, **_generating(asked)}
        if asked.get("max_length") is not None and asked.get("max_new_tokens") is None:
            arguments.pop("max_new_tokens", None)
        if (first := _language_id(model)) is not None:
            arguments.setdefault("forced_bos_token_id", first)
        chosen = model.plan(arguments)
        cut = CUTS.get(asked.get("truncation"))
        if cut is None:
            raise ConfigError(f"truncation={asked['truncation']!r}: must be True or False")
        sources = [_cut(model, self._source_ids(tokenizers, self.prefix + text), cut) for text in texts]
        outputs = self._decode(model, sources, chosen)
        if asked.get("return_tensors") or asked.get("return_type") == 0:
            size = int(asked.get("batch_size") or 1)
            return [
                [{f"{self.name}_token_ids": row} for row in rows]
                for i in range(0, len(outputs), size)
                for rows in _padded(outputs[i : i + size], chosen)
            ]
        clean = bool(asked.get("clean_up_tokenization_spaces"))
        return [[{f"{self.name}_text": _decoded(tokenizers, each, clean)} for each in found] for found in outputs]

    def _decode(self, model: TformerForSeq2SeqLM, sources: list[list[int]], chosen: Plan) -> list[list[Hypothesis]]:
        """Outputs of each source, decoded in batches of like lengths."""
        found: list[list[Hypothesis]] = [[] for _ in sources]
        options, limits = chosen.options, model.translator.engine.limits
        most = lambda longest: limits.sentences(options.rows, longest, options.max_tokens)  # noqa: E731
        for indices in length_batches([len(each) for each in sources], BATCH_TOKENS // options.rows, most):
            batch = make_batch([sources[i] for i in indices], model.translator.engine.config.pad_id, indices)
            for i, outputs in zip(indices, model.hypotheses(batch, chosen), strict=True):
                found[i] = outputs
        return found

    def _source_ids(self, tokenizers: Tokenizers, text: str) -> list[int]:
        """Ids of a text, which may say a Marian model's target language at its start."""
        prepared = self.model.prepared
        marian = prepared and prepared.config.get("model_type") == "marian"
        if not (code := CODE.match(text) if marian else None):
            return tokenizers.source_ids(text.strip())
        found, ids = tokenizers.source.id_of(code[0]), tokenizers.source_ids(text[code.end() :].strip())
        return [tokenizers.source.specials.unk if found is None else found, *ids[len(tokenizers.prefix) :]]

    def _model(self, src: str, tgt: str) -> TformerForSeq2SeqLM:
        """The model with the text of a pair of languages; a model without languages has one text."""
        if (src, tgt) not in self._models:
            try:
                opened = TformerForSeq2SeqLM.opened(replace(self.opening, src_lang=src, tgt_lang=tgt))
            except ConfigError as error:
                # As transformers: the languages of a task's name mean nothing to a model of one pair.
                if "not used by models of type" not in str(error) and "the model has one language" not in str(error):
                    raise
                opened = TformerForSeq2SeqLM.opened(self.opening)
            self._models[src, tgt] = opened
        return self._models[src, tgt]


def _generating(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are `generate`'s."""
    return {name: value for name, value in given.items() if name not in TEXT}


def _defaults(model: TformerForSeq2SeqLM) -> dict[str, Any]:
    """The pipeline's own defaults that hold for a model; a bundle's own hold for it."""
    if not model.prepared:
        return {}
    found = dict(OWN)
    if model.settings.get("max_new_tokens") or model.settings.get("max_length", 20) != 20:
        found.pop("max_new_tokens")
    return found


def _language_id(model: TformerForSeq2SeqLM) -> int | None:
    """The code of the target language, which begins an output, in a model of many languages."""
    kinds = ("m2m_100", "mbart", "plbart")
    if not model.prepared or model.prepared.config.get("model_type") not in kinds:
        return None
    first = model.translator.options.first_ids
    return int(first[0]) if first else int(model.translator.engine.config.start_id)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{value!r:.40} is no text: give a text, or a list of texts")
    return value


def _cut(model: TformerForSeq2SeqLM, ids: list[int], cut: bool) -> list[int]:
    """Source ids, cut before what ends them. Raises LimitError for too many that are not to be cut."""
    limit = model.translator.engine.limits.src_tokens
    if cut:
        most = model.prepared.most_tokens if model.prepared else 0
        most = min(most or limit, limit)
        ends = model.translator.tokenizers.around[1]
        if len(ids) > most:
            ids = [*ids[: most - len(ends)], *ends]
    return ids


def _decoded(tokenizers: Tokenizers, found: Hypothesis, clean: bool) -> str:
    """The text of an output. Spaces are cleaned up only where asked, whatever the tokenizer's own settings say."""
    target = tokenizers.target
    if isinstance(target, Wrapped):
        return target.decode_as([i for i in found.ids if i < target.size], clean)
    text = tokenizers.target_text(found.ids)
    from ..bundle.text.wrapped import cleaned

    return cleaned(text) if clean else text


def _padded(outputs: list[list[Hypothesis]], chosen: Plan) -> Iterator[Any]:
    """Of each source of a batch its sequences, as long as the longest of the batch."""
    rows = iter(np.asarray(sequences_of([each for found in outputs for each in found], chosen)))
    for found in outputs:
        yield [next(rows) for _ in found]
