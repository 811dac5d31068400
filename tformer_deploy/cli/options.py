"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import ConfigError, DataError, unknown
from ..base.headers import read_toml
from ..base.lines import MOST_LINE_BYTES
from ..base.settings import parse_settings
from ..engines import ENGINES, STANDARD
from ..engines.spec import EngineSpec
from ..model.config import ModelConfig, TrainConfig

if TYPE_CHECKING:
    from ..bundle.manifest import Bundle
    from ..bundle.text import Tokenizer
    from ..decoding import Decoding
    from ..translate.opening import TranslatorOptions

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a field of the model or of training, such as model.d_ff=512 or train.lr=0.002; repeatable.",
    ),
]
ConfigOption = Annotated[Path | None, typer.Option(help="TOML file with [model] and [train].")]
Preset = Annotated[str, typer.Option(help="Model size: tiny, small, base or big.")]
VocabSize = Annotated[int, typer.Option(help="Vocabulary size.")]
Choose = Annotated[
    str, typer.Option(help="Of a line's outputs: the best by score, or by bleu or chrf against its reference.")
]
FilterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="NAME=VALUE",
        help="Set a filter: max_ratio, max_copied, max_repeats, min_script or min_score; 0: off; repeatable.",
    ),
]
Candidates = Annotated[int | None, typer.Option(help="Outputs per line to choose from.")]
ModelSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a field of the model, such as model.d_ff=512; repeatable."),
]

CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        help="Run folder for eager PyTorch, if it has moved since the export; or FILE.py:FUNCTION, which is run."
    ),
]


def among(names: Iterable[str], word: str = "or") -> str:
    """Names as in `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last


def variants(engines: Sequence[EngineSpec]) -> str:
    """Help of `--variant`: what it is, and for which of the engines it is the precision."""
    precise = [spec.name for spec in engines if spec.precisions]
    precision = f" For {among(precise, 'and')}: the precision." if precise else ""
    return f"Name of a variant ({STANDARD}: the standard graphs).{precision}"


BACKENDS = among(spec.name for spec in ENGINES)
MEASURED = among(spec.name for spec in ENGINES if spec.measured)
ENCODERS = [spec for spec in ENGINES if not spec.no_encoder]
ENCODING = among(spec.name for spec in ENCODERS)
MOVED = among((spec.name for spec in ENGINES if len(spec.devices) > 1), "and")
Backend = Annotated[str, typer.Option(help=f"Backend: {BACKENDS}.")]
DecodeSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a decoding option, such as length_penalty=0.6; repeatable."),
]
Variant = Annotated[str | None, typer.Option(help=f"{variants(ENGINES)} Default: the bundle's default.")]
ALL_VARIANTS = "Repeatable. Default: all variants."
CheckedVariants = Annotated[
    list[str] | None,
    typer.Option(metavar="VARIANT", help=f"{variants([spec for spec in ENGINES if not spec.plans])} {ALL_VARIANTS}"),
]
MeasuredVariants = Annotated[
    list[str] | None,
    typer.Option(
        metavar="VARIANT",
        help=f"{variants([spec for spec in ENGINES if spec.measured and not spec.plans])} {ALL_VARIANTS}",
    ),
]
DeviceOption = Annotated[str, typer.Option(help=f"Device of {MOVED}: cpu or cuda.")]
Shortlisted = Annotated[
    bool,
    typer.Option(
        "--shortlist",
        help="Score only the tokens that are likely for the source (tformer shortlist); faster for small batches.",
    ),
]
Beams = Annotated[int | None, typer.Option(help="Beam size; 1: greedy search.")]
NBest = Annotated[int | None, typer.Option(help="Outputs per line, printed as NUMBER ||| TEXT ||| SCORE.")]
Sample = Annotated[
    bool, typer.Option("--sample", help="Sample instead of searching; --n-best is the number of samples.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of --sample.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest output, in tokens.")]
Allowed = Annotated[Path | None, typer.Option(help="File with the only allowed outputs, one per line.")]
FirstToken = Annotated[
    list[str] | None,
    typer.Option(metavar="TOKEN", help="Vocabulary entry that every output begins with; repeatable."),
]
Suppress = Annotated[
    list[str] | None, typer.Option(metavar="TOKEN", help="Vocabulary entry that is never produced; repeatable.")
]
EndToken = Annotated[
    list[str] | None, typer.Option(metavar="TOKEN", help="Vocabulary entry that ends an output; repeatable.")
]
Align = Annotated[
    bool, typer.Option("--align", help="Add the alignment, the source position of each target token: TEXT ||| 0-0.")
]
BatchTokens = Annotated[
    int, typer.Option(min=0, help="Batch size in padded source tokens times beams; 0: chosen for the engine.")
]
MaxLineBytes = Annotated[int, typer.Option(min=1, max=MOST_LINE_BYTES, help="Refuse input lines longer than this.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads; 0: one per core.")]
WorkerThreads = Annotated[int, typer.Option(min=0, help="Threads per worker; 0: the cores divided by --workers.")]

Slots = Annotated[int, typer.Option(min=1, max=4096, help="Lines of a model that run at once.")]
MaxQueue = Annotated[
    int, typer.Option(min=0, max=1 << 20, help="Lines of a model that wait; further ones are refused.")
]
Limits = Annotated[Path | None, typer.Option(help="TOML file with the most that a request may ask for: docs/serve.md.")]

_SECTIONS = {"model": ModelConfig, "train": TrainConfig}


def folder(text: str) -> Path:
    """A folder. Raises BadParameter for an empty name, which Path takes for the current folder."""
    if not text:
        raise typer.BadParameter("it is empty: name a folder, or . for this one")
    return Path(text)


def merge_settings(
    config: Path | None, settings: list[str] | None, train_flags: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of [model] and [train]; the command line overrides the TOML file. Raises ConfigError for unknown keys."""
    merged: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    if config:
        for name, values in read_toml(config).items():
            if name not in merged:
                raise unknown(f"section of {config}", name, merged)
            if not isinstance(values, dict):
                raise ConfigError(f"{config}: {name} must be a section [{name}], got {values!r}")
            merged[name].update(values)
    for item in settings or []:
        key, equals, value = item.partition("=")
        section, dot, field = key.partition(".")
        if not (equals and dot):
            raise ConfigError(f"--set {item}: write model.KEY=VALUE or train.KEY=VALUE")
        if section not in merged:
            raise unknown("section", section, merged)
        merged[section].update(parse_settings(_SECTIONS[section], section, {field: value}))
    merged["train"].update(train_flags)
    return merged["model"], merged["train"]


def model_settings(config: Path | None, settings: list[str] | None) -> dict[str, Any]:
    """Values of [model] for a verb that trains nothing. Raises ConfigError for those of [train]."""
    model, training = merge_settings(config, settings, {})
    if training:
        raise ConfigError(f"train.{next(iter(training))}: nothing is trained here: leave it out")
    return model


def translator_options(bundle: Bundle, params: Mapping[str, Any]) -> TranslatorOptions:
    """What translate and corpus ask for, by the names of their parameters.

    Raises ConfigError, and DataError for a file of --allowed without a line.
    """
    from ..translate.opening import TranslatorOptions

    flags = {name: params[name] for name in ("beams", "n_best", "seed", "max_tokens")}
    flags |= {"sampling": params["sample"] or None, "align": params["align"] or None}
    pieces = {"first_ids": params["first_token"], "suppress": params["suppress"], "end_ids": params["end_token"]}
    own = "backend", "variant", "device", "threads", "workers", "shortlist", "batch_tokens", "max_line_bytes"
    return TranslatorOptions(
        bundle,
        checkpoint=params.get("checkpoint"),
        allowed=allowed_outputs(params["allowed"]),
        decoding=decoding_options(bundle, decode_values(params["settings"], flags), pieces),
        **{name: params[name] for name in own},
    )


def decode_values(settings: list[str] | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Values of decoding options; flags override --set. Raises ConfigError for unknown names."""
    from ..decoding import DecodeOptions

    own = {name: value for name, value in flags.items() if value is not None}
    return {**parse_settings(DecodeOptions, "decoding", named_values("--set", settings)), **own}


def named_values(option: str, items: list[str] | None) -> dict[str, str]:
    """What a repeatable option NAME=VALUE says. Raises ConfigError."""
    for item in items or []:
        if "=" not in item:
            raise ConfigError(f"{option} {item}: write NAME=VALUE")
    return dict(item.split("=", 1) for item in items or [])


def piece_ids(tokenizer: Tokenizer, pieces: list[str]) -> tuple[int, ...]:
    """Ids of vocabulary entries. Raises ConfigError for one that does not exist."""
    ids = []
    for piece in pieces:
        index = tokenizer.id_of(piece) if is_text(piece) else None
        if index is None:
            raise ConfigError(f"'{piece}' is not in the vocabulary: tformer score --tokens shows how text is split")
        ids.append(index)
    return tuple(ids)


def decoding_options(bundle: Bundle, values: dict[str, Any], pieces: dict[str, list[str] | None]) -> Decoding:
    """Decoding options over the bundle's defaults, with the ids of vocabulary entries. Raises ConfigError."""
    from ..translate.opening import decoding_of

    tokenizers = bundle.tokenizers()
    ids = {name: piece_ids(tokenizers.target, entries) for name, entries in pieces.items() if entries}
    return decoding_of(bundle, {**values, **ids})


def allowed_outputs(path: Path | None) -> list[str]:
    """Lines of the file of --allowed. Raises DataError if it is empty."""
    from ..base.lines import read_lines

    outputs = read_lines(path) if path else []
    if path and not outputs:
        raise DataError(f"{path} has no line: give each output that is allowed")
    return outputs


def is_text(argument: str) -> bool:
    """Whether an argument is valid Unicode; Python makes lone surrogates of bytes that are not UTF-8."""
    return argument.isascii() or not any("\ud800" <= character <= "\udfff" for character in argument)
