"""What Python and C++ both know, and tables of the docs, written from Python: `make spec`.

Decoding options become schemas/options.json, decode/options.inc and the table in docs/decoding.md; keys of `model` and
`recipe` schemas/model.json; graphs and their tensors schemas/contract.json. C++ embeds the last two. Messages and
constants become spec.hpp, the version tformer/version.h. Settings of models, training and recipes become tables in
docs/.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tformer_deploy import __version__
from tformer_deploy.base import messages
from tformer_deploy.base.settings import field_texts
from tformer_deploy.bundle.contract import (
    DEAD,
    GRAPHS,
    KINDS,
    MEMORY_GRAPH,
    OPTIONAL_FILES,
    TARGETS,
    TENSORS,
    WEIGHTS,
    Template,
    file_of,
    kind_of,
)
from tformer_deploy.bundle.recipe import Axes, Axis, Recipe, Tolerance, recipe_from_dict
from tformer_deploy.decoding.options import Bounds, DecodeOptions
from tformer_deploy.decoding.rules import LEAST
from tformer_deploy.engines.base import FIRST_CAPACITY
from tformer_deploy.engines.ort.in_place import LIST_UNIT, SPARSE
from tformer_deploy.engines.speculative import MISSES
from tformer_deploy.model.config import BATCH_TOKENS, MOST_OF_MODEL, PRESETS, ModelConfig, TrainConfig

ROOT = Path(__file__).parent.parent
VERSION_H = ROOT / "engines/include/tformer/version.h"
SCHEMAS = ROOT / "tformer_deploy/base/schemas"
OPTIONS_INC = ROOT / "engines/src/decode/options.inc"
BEGIN, END = "<!-- make spec: {} -->\n", "<!-- end of what make spec writes -->\n"
SPEC_HPP = """// Written by make spec from Python: messages of tformer_deploy/base/messages.py, and constants.
#pragma once

#include <cstdint>
#include <string>

namespace tformer::spec {{

{constants}
{messages}
}}  // namespace tformer::spec
"""
FROM_TEXT = ("src_vocab", "tgt_vocab", "pad_id", "bos_id", "eos_id", "module_parameters")
"""Fields of a model that nobody sets, as tokenizers and modules decide them."""
MOST = MOST_OF_MODEL
CONSTANTS: tuple[tuple[str, str, float, str], ...] = (
    ("float", "dead", DEAD, "Log-probability sum of a padding row in a TensorRT step."),
    (
        "float",
        "least",
        LEAST,
        "The best log-probability of a row is above it, unless it is NaN, infinite or overflowed.",
    ),
    ("double", "sparse", SPARSE, "With fewer sentences than this share, caches are copied to smaller buffers."),
    ("std::int64_t", "list_unit", LIST_UNIT, "A shortlist is padded to a multiple of it."),
    ("std::int64_t", "first_capacity", FIRST_CAPACITY, "Positions of a new cache, which doubles when it is full."),
    ("int", "most_misses", MISSES, "Wrong predictions after which the GPU no longer runs ahead of a batch's search."),
    (
        "std::int64_t",
        "batch_tokens",
        BATCH_TOKENS,
        "Padded source tokens of a batch, unless an engine or the user sets it.",
    ),
    ("std::int64_t", "most_width", MOST["d_ff"], "Largest width in a model, that of its feed-forward layers."),
    ("std::int64_t", "most_heads", MOST["heads"], "Most heads of an attention."),
)
"""Type, name, value and comment of the constants in spec.hpp."""
IDS = "std::vector<std::int64_t>"
LINE = 128  # characters of JSON
MOST_INT = 2**63 - 1  # of int64
CPP = {"int": "std::int64_t", "float": "double", "bool": "bool", "choice": "std::string"}
CPP |= {"token ids": IDS, "sequences of token ids": f"std::vector<{IDS}>"}


def kind(hint: Any) -> str:
    """What a field's type is called."""
    if get_origin(hint) is tuple:
        return "sequences of token ids" if get_origin(get_args(hint)[0]) is tuple else "token ids"
    return "choice" if get_origin(hint) is Literal else str(hint.__name__)


def options() -> list[dict[str, Any]]:
    """Every decoding option."""
    hints = get_type_hints(DecodeOptions)
    return [
        {
            "name": each.name,
            "type": kind(hints[each.name]),
            **({"choices": list(get_args(hints[each.name]))} if kind(hints[each.name]) == "choice" else {}),
            "default": each.default,
            "rule": each.metadata["bounds"].rule,
            "of": each.metadata["of"],
            "help": each.metadata["text"],
        }
        for each in fields(DecodeOptions)
    ]


def options_inc() -> str:
    """TFORMER_OPTION(type, name, default, of, choices, bounds, rule, kind, help) of every option."""
    bounds = {each.name: each.metadata["bounds"] for each in fields(DecodeOptions)}
    lines = ["// Written by make spec from tformer_deploy/decoding/options.py.\n"]
    for each in options():
        default = "{}" if each["default"] == () else json.dumps(each["default"])
        about = [json.dumps(each["of"]), json.dumps(" ".join(each.get("choices", ())))]
        about += [cpp_bounds(bounds[each["name"]], each["type"] == "int"), json.dumps(each["rule"])]
        about += [json.dumps(each["type"]), json.dumps(each["help"])]
        words = ", ".join((CPP[each["type"]], each["name"], default, *about))
        lines.append(f"TFORMER_OPTION({words})\n")
    return "".join(lines)


def cpp_bounds(bounds: Bounds, whole: bool) -> str:
    """Lowest and highest, and whether these are outside the range; those of whole numbers are inside."""
    low = bounds.above if bounds.least is None else bounds.least
    high = bounds.below if bounds.most is None else bounds.most
    outside = [bounds.above is not None, bounds.below is not None]
    if whole:  # 2^63, which a seed is below, is no int64
        low, high = -MOST_INT if low is None else low + outside[0], MOST_INT if high is None else high - outside[1]
        ends, outside = [str(low), str(high)], [False, False]
    else:
        ends = [f"{-1e308 if low is None else float(low)!r}", f"{1e308 if high is None else float(high)!r}"]
    return f"(Bounds<{CPP['int' if whole else 'float']}>{{{', '.join(ends + list(map(json.dumps, outside)))}}})"


def defaults(cls: type[Any]) -> dict[str, Any]:
    """Every key of a table and its default; null: there is none."""

    def default(each: Field[Any]) -> Any:
        if each.default_factory is not MISSING:
            return {}
        return None if each.default is MISSING else each.default

    return {each.name: default(each) for each in fields(cls)}


def model() -> dict[str, Any]:
    """Keys, defaults and choices of `model` and `recipe` in a manifest, and the largest sizes."""
    axes = {each.name: {end.name: getattr(each.default, end.name) for end in fields(Axis)} for each in fields(Axes)}
    tables = {"model": defaults(ModelConfig), "most": MOST_OF_MODEL, "recipe": defaults(Recipe), "axes": axes}
    return {**tables, "choices": {"model": choices(ModelConfig), "recipe": choices(Recipe)}}


def choices(cls: type[Any]) -> dict[str, list[str]]:
    """Values of the keys of a table that take one of a few."""
    hints = get_type_hints(cls).items()
    return {name: list(get_args(hint)) for name, hint in hints if get_origin(hint) is Literal}


def contract() -> dict[str, Any]:
    """Graphs of every target, and the tensors of every kind."""

    def tensor(each: Template) -> dict[str, Any]:
        return {key: value for key, value in asdict(each).items() if value}

    def graph(name: str, recipe: Recipe) -> dict[str, Any]:
        about = {"name": name, "file": file_of(name, recipe), "kind": kind_of(name, recipe)}
        only = {"only": MEMORY_GRAPH} if name == MEMORY_GRAPH else {}
        return {**about, "tensors": TARGETS[recipe.target][name], **only}

    recipes = [
        recipe_from_dict({"target": each, "cache": "growing" if each == "onnx" else "static"}) for each in TARGETS
    ]
    return {
        "kinds": list(KINDS),
        "graphs": list(GRAPHS),
        "weights": WEIGHTS,
        "optional_files": list(OPTIONAL_FILES),
        "targets": {recipe.target: [graph(name, recipe) for name in TARGETS[recipe.target]] for recipe in recipes},
        "tensors": {
            kind: {side: list(map(tensor, found)) for side, found in zip(("inputs", "outputs"), sides, strict=True)}
            for kind, sides in TENSORS.items()
        },
    }


def spec_hpp() -> str:
    """Messages as C++: constants, and functions where they have fields."""

    def message(name: str, text: str) -> str:
        fields, words = [], []
        for literal, field, form, _ in Formatter().parse(text):
            words += [json.dumps(literal)] if literal else []
            if field:
                fields.append(f"{'std::int64_t ' if form == 'd' else 'const std::string& '}{field}")
                words.append(f"std::to_string({field})" if form == "d" else field)
        if not fields:
            return f"constexpr const char* {name} = {words[0]};\n"
        return f"inline std::string {name}({', '.join(fields)}) {{\n  return {' + '.join(words)};\n}}\n"

    texts = {name.lower(): text for name, text in vars(messages).items() if name.isupper()}
    constants = "".join(
        f"/// {text}\nconstexpr {kind} {name} = {value:{'.1e' if kind == 'float' else ''}}{'F' * (kind == 'float')};\n"
        for kind, name, value, text in CONSTANTS
    )
    return SPEC_HPP.format(constants=constants, messages="".join(message(name, text) for name, text in texts.items()))


def version_h() -> str:
    """The version for the preprocessor."""
    parts = dict(zip(("MAJOR", "MINOR", "PATCH"), __version__.split("."), strict=True))
    numbers = "".join(f"#define TFORMER_VERSION_{name} {number}\n" for name, number in parts.items())
    return (
        "/* Written by make spec from tformer_deploy/__init__.py: the version of these headers. */\n"
        "#ifndef TFORMER_VERSION_H\n#define TFORMER_VERSION_H\n\n"
        f'{numbers}#define TFORMER_VERSION "{__version__}"\n\n#endif\n'
    )


def table() -> str:
    """The options for docs/decoding.md."""
    rows = "".join(
        f"| `{each['name']}` | {each['type']} | `{json.dumps(each['default'])}` | "
        f"{each['rule'] or ', '.join(each.get('choices', ())) or ''} | {each['help']} |\n"
        for each in options()
    )
    return f"| option | type | default | values | what it does |\n|---|---|---|---|---|\n{rows}"


def settings(cls: type[Any], *left_out: str) -> str:
    """The fields of a config for the docs."""
    hints, texts = get_type_hints(cls), field_texts(cls)
    shown = [each for each in fields(cls) if each.name not in left_out]
    about = [(each.name, values_of(hints[each.name]), default_of(each), texts[each.name].split()) for each in shown]
    rows = "".join(f"| `{name}` | {values} | {default} | {' '.join(text)} |\n" for name, values, default, text in about)
    return f"| key | values | default | what it is |\n|---|---|---|---|\n{rows}"


def values_of(hint: Any) -> str:
    """A type, or the values to choose from."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(hint))
    return {int: "int", float: "float", bool: "true or false", str: "text"}.get(hint, "table")


def default_of(each: Field[Any]) -> str:
    """A field's default as TOML has it; empty: there is none, or it is a table."""
    if each.default is MISSING:
        return ""
    if isinstance(each.default, Axis):
        inner = ", ".join(f"{end.name} = {getattr(each.default, end.name)}" for end in fields(Axis))
        return f"`{{{inner}}}`"
    return f"`{json.dumps(each.default)}`"


def presets() -> str:
    """The named sizes of models."""
    keys = list(dict.fromkeys(key for values in PRESETS.values() for key in values))
    usual = defaults(ModelConfig)
    rows = "".join(
        f"| `{name}` | {' | '.join(str(values.get(key, usual[key])) for key in keys)} |\n"
        for name, values in PRESETS.items()
    )
    return f"| preset | {' | '.join(f'`{key}`' for key in keys)} |\n|{'---|' * (len(keys) + 1)}\n{rows}"


TABLES: dict[str, dict[str, str]] = {
    "decoding.md": {"options": table()},
    "train.md": {"train": settings(TrainConfig), "model": settings(ModelConfig, *FROM_TEXT), "presets": presets()},
    "passes.md": {"recipe": settings(Recipe, "plans"), "axes": settings(Axes), "tolerance": settings(Tolerance)},
}
"""Page → name → table."""


def page(path: Path, tables: dict[str, str]) -> str:
    """A page of the docs with these tables."""
    text = path.read_text(encoding="utf-8")
    for name, content in tables.items():
        before, rest = text.split(BEGIN.format(name))
        text = before + BEGIN.format(name) + content + END + rest.split(END, 1)[1]
    return text


def pretty(value: Any, indent: int = 0) -> str:
    """JSON with a line for what fits into one."""
    text = json.dumps(value)
    if indent + len(text) < LINE or not isinstance(value, (dict, list)):
        return text
    inside, end = "\n" + " " * (indent + 2), "\n" + " " * indent
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {pretty(each, indent + 2)}" for key, each in value.items()]
        return "{" + inside + f",{inside}".join(parts) + end + "}"
    return "[" + inside + f",{inside}".join(pretty(each, indent + 2) for each in value) + end + "]"


def files() -> dict[Path, str]:
    """What the files must hold."""
    return {
        SCHEMAS / "options.json": pretty(options()) + "\n",
        SCHEMAS / "model.json": pretty(model()) + "\n",
        SCHEMAS / "contract.json": pretty(contract()) + "\n",
        OPTIONS_INC: options_inc(),
        ROOT / "engines/src/spec.hpp": spec_hpp(),
        VERSION_H: version_h(),
        **{ROOT / "docs" / name: page(ROOT / "docs" / name, tables) for name, tables in TABLES.items()},
    }


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
    sys.exit()
