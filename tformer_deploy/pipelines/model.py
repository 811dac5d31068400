"""`TformerForSeq2SeqLM`: `generate` with the arguments and results of transformers, over our engines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ArtifactError, ConfigError, DataError
from ..decoding import Hypothesis, check_search, decode
from ..decoding.constrained import Asked, decode_constrained
from ..decoding.guided import HfRules, decode_guided
from ..engines.base import Batch
from ..translate.batches import make_batch
from ..translate.opening import TranslatorOptions, open_translator
from ..translate.translator import Translator
from .arguments import Model, Plan, known_settings, plan, require_known, settings_of_bundle
from .cache import Prepared, Source, is_bundle, prepare

RECIPES = {"ort": "fp32", "native": "native-fp32", "cpp": "fp32", "openvino": "fp32", "trt": "trt"}
"""What a folder is exported as for a backend, where no variant is named."""
NOT_GIVEN = (
    "scores",
    "logits",
    "beam_indices",
    "encoder_attentions",
    "encoder_hidden_states",
    "decoder_attentions",
    "cross_attentions",
    "decoder_hidden_states",
    "past_key_values",
)
"""What transformers can return besides."""


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns with `return_dict_in_generate`."""

    sequences: Any
    """(B x num_return_sequences, T) token ids."""
    sequences_scores: Any = None
    """(B x num_return_sequences) with a beam and `output_scores`: by what the outputs are ranked."""

    def __getattr__(self, name: str) -> Any:
        if name in NOT_GIVEN:
            raise ConfigError(f"{name} is not given here: the search keeps no arrays of its steps; use transformers")
        raise AttributeError(name)


@dataclass(frozen=True)
class Opening:
    """Which model, and what runs it."""

    folder: Path
    backend: str = "ort"
    variant: str | None = None
    device: str = "cpu"
    threads: int = 0
    src_lang: str = ""
    tgt_lang: str = ""
    compare: bool = True


class TformerForSeq2SeqLM:
    """An encoder-decoder model that generates. Close it, or use it in a `with` statement."""

    def __init__(self, translator: Translator, prepared: Prepared | None, others: Mapping[str, Any]) -> None:
        """`prepared`: of a folder; None for a bundle, whose own defaults hold. Use `from_pretrained`."""
        self.translator, self.prepared, self.others = translator, prepared, others
        config = translator.engine.config
        limit = translator.engine.limits.tgt_tokens
        self._model = Model(config.start_id, config.pad_id, config.eos_id, min(limit, config.max_positions))
        if prepared:
            self.settings = known_settings(prepared.settings)
        else:
            self.settings, self.others = settings_of_bundle(translator.decoding.defaults)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **how: Any) -> Self:
        """Open a Hugging Face folder, which is exported on first use, or a bundle.

        `how`: fields of `Opening`: `backend`, `variant`, `device`, `threads`, `src_lang`, `tgt_lang`; `compare=False`
        does not compare the import with transformers. Raises TformerError.
        """
        if strange := how.keys() - set(Opening.__dataclass_fields__):
            known = ", ".join(each for each in Opening.__dataclass_fields__ if each != "folder")
            raise ConfigError(f"from_pretrained: {min(strange)} is not known: give {known}")
        return cls.opened(Opening(Path(folder), **how))

    @classmethod
    def opened(cls, opening: Opening) -> Self:
        """The same of an `Opening`."""
        if is_bundle(opening.folder):
            return cls(_translator(opening.folder, opening, opening.variant), None, {})
        recipe = opening.variant or RECIPES.get(opening.backend, "fp32")
        source = Source(opening.folder, recipe, opening.src_lang, opening.tgt_lang, opening.compare)
        variant = None if recipe == "fp32" else recipe
        prepared = prepare(source)
        try:
            return cls(_translator(prepared.bundle, opening, variant), prepared, {})
        except ArtifactError:  # a damaged cache
            prepared = prepare(source, again=True)
            return cls(_translator(prepared.bundle, opening, variant), prepared, {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the engine's device."""
        self.translator.close()

    def plan(self, arguments: Mapping[str, Any]) -> Plan:
        """How these arguments decode, over the model's own settings. Raises ConfigError."""
        given = dict(arguments)
        config = given.pop("generation_config", None)
        found = config.to_diff_dict() if hasattr(config, "to_diff_dict") else config or {}
        require_known(given)
        return plan({**self.settings, **known_settings(found), **given}, self._model, self.others)

    def generate(self, inputs: Any = None, attention_mask: Any = None, **arguments: Any) -> Any:
        """The outputs of token ids (B, S), with the arguments of transformers' `generate`.

        torch in, torch out; numpy else. Sampling draws from our own generator, by `seed`, so that samples differ from
        torch's. Raises ConfigError for arguments that are not supported, LimitError, and errors of the engine.
        """
        given = inputs if inputs is not None else arguments.pop("input_ids", None)
        arguments.pop("input_ids", None)
        if given is None:
            raise ConfigError("generate: give input_ids")
        chosen = self.plan(arguments)
        batch = _batch(given, attention_mask, self._model)
        outputs = self.hypotheses(batch, chosen, lambda ids: _like(ids, given))
        rows = [each for found in outputs for each in found]
        sequences = _like(sequences_of(rows, chosen), given)
        if not arguments.get("return_dict_in_generate"):
            return sequences
        scored = arguments.get("output_scores")
        values = np.array([each.value for each in rows], np.float32) if scored else None
        return GenerateOutput(sequences, None if values is None else _like(values, given))

    def hypotheses(self, batch: Batch, chosen: Plan, as_given: Any = lambda ids: ids) -> list[list[Hypothesis]]:
        """The outputs of each source by a plan."""
        engine, options = self.translator.engine, chosen.options
        ends = np.array(chosen.end_ids, np.int32)
        rules = HfRules(
            options, ends, options.max_tokens, chosen.begin_suppress, chosen.allowed, as_given, chosen.never_ends
        )
        with self.translator.in_use():
            check_search(engine, batch, options)
            if chosen.constraints:
                return decode_constrained(engine, batch, Asked(chosen.constraints, options, chosen.start_id, rules))
            if chosen.guided:
                return decode_guided(engine, batch, rules, chosen.start_id)
            return decode(engine, batch, options)


def _translator(bundle: Path, opening: Opening, variant: str | None) -> Translator:
    return open_translator(
        TranslatorOptions(bundle, opening.backend, variant=variant, device=opening.device, threads=opening.threads)
    )


def sequences_of(rows: Sequence[Hypothesis], chosen: Plan) -> NDArray[np.int64]:
    """(N, T) as transformers has them: start token, output, end token, padding."""
    full = [[chosen.start_id, *each.ids, *([] if each.end_id is None else [each.end_id])] for each in rows]
    found = np.full((len(full), max(map(len, full))), chosen.fill_id, np.int64)
    for target, ids in zip(found, full, strict=True):
        target[: len(ids)] = ids
    return found


def _is_torch(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch"


def _like(array: Any, given: Any) -> Any:
    """An array as what `given` is: a tensor of torch on its device, else as it is."""
    if not _is_torch(given):
        return array
    torch = sys.modules["torch"]
    values = array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array
    return torch.from_numpy(np.ascontiguousarray(values)).to(given.device)


def _numbers(name: str, value: Any) -> NDArray[Any]:
    """(B, S) from a tensor, an array or lists. Raises DataError."""
    try:
        found = np.asarray(value.detach().cpu().numpy() if _is_torch(value) else value)
    except ValueError:
        raise DataError(f"{name}: rows of several lengths: pad them, with attention_mask") from None
    if found.ndim != 2 or not found.size or not (np.issubdtype(found.dtype, np.integer) or found.dtype == bool):
        raise DataError(f"{name}: must be whole numbers (sentences, tokens), not {found.dtype} {found.shape}")
    return found


def _batch(input_ids: Any, attention_mask: Any, model: Model) -> Batch:
    """Sources, without their padding on the right. Raises DataError for other padding."""
    ids = _numbers("input_ids", input_ids)
    if attention_mask is not None:
        mask = _numbers("attention_mask", attention_mask) != 0
    else:
        mask = ids != model.pad_id if model.pad_id != model.eos_id else np.ones_like(ids, bool)
    if mask.shape != ids.shape:
        raise DataError(f"attention_mask {mask.shape} and input_ids {ids.shape} differ in shape: give one of the same")
    lengths = mask.sum(1)
    if not lengths.all() or (mask != (np.arange(ids.shape[1]) < lengths[:, None])).any():
        raise DataError("attention_mask: only padding on the right is supported: pad there, and no empty sentence")
    return make_batch([row[:length].tolist() for row, length in zip(ids, lengths, strict=True)], model.pad_id)
