"""What Python and C++ both know of options and models, written from Python's dataclasses: `make spec`.

Writes schemas/options.json and schemas/model.json, which C++ embeds, decode/options.inc, and the table in
docs/decoding.md.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tformer_deploy.bundle.recipe import Axes, Axis, Recipe
from tformer_deploy.decoding.options import Bounds, DecodeOptions
from tformer_deploy.model.config import MOST_OF_MODEL, ModelConfig

ROOT = Path(__file__).parent.parent
SCHEMAS = ROOT / "tformer_deploy/base/schemas"
OPTIONS_INC = ROOT / "engines/src/decode/options.inc"
PAGE = ROOT / "docs/decoding.md"
BEGIN, END = "<!-- make spec -->\n", "<!-- end of what make spec writes -->\n"
IDS = "std::vector<std::int64_t>"
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
    """TFORMER_OPTION(type, name, default, of, choices, bounds, rule) of every option."""
    bounds = {each.name: each.metadata["bounds"] for each in fields(DecodeOptions)}
    lines = ["// Written by make spec from tformer_deploy/decoding/options.py.\n"]
    for each in options():
        default = "{}" if each["default"] == () else json.dumps(each["default"])
        about = json.dumps(each["of"]), json.dumps(" ".join(each.get("choices", ()))), cpp_bounds(bounds[each["name"]])
        words = ", ".join((CPP[each["type"]], each["name"], default, *about, json.dumps(each["rule"])))
        lines.append(f"// {each['help']}\nTFORMER_OPTION({words})\n")
    return "".join(lines)


def cpp_bounds(bounds: Bounds) -> str:
    """Lowest and highest, and whether these belong to the range."""
    low = bounds.above if bounds.least is None else bounds.least
    high = bounds.below if bounds.most is None else bounds.most
    ends = [f"{-1e308 if low is None else float(low)!r}", f"{1e308 if high is None else float(high)!r}"]
    strict = [json.dumps(bounds.above is not None), json.dumps(bounds.below is not None)]
    return f"(Bounds{{{', '.join(ends + strict)}}})"


def defaults(cls: type[Any]) -> dict[str, Any]:
    """Every key of a table and its default; null: there is none."""

    def default(each: Field[Any]) -> Any:
        if each.default_factory is not MISSING:
            return {}
        return None if each.default is MISSING else each.default

    return {each.name: default(each) for each in fields(cls)}


def model() -> dict[str, Any]:
    """Keys and defaults of `model` and `recipe` in a manifest, and the largest sizes."""
    axes = {each.name: {end.name: getattr(each.default, end.name) for end in fields(Axis)} for each in fields(Axes)}
    return {"model": defaults(ModelConfig), "most": MOST_OF_MODEL, "recipe": defaults(Recipe), "axes": axes}


def table() -> str:
    """The options for docs/decoding.md."""
    rows = "".join(
        f"| `{each['name']}` | {each['type']} | `{json.dumps(each['default'])}` | "
        f"{each['rule'] or ', '.join(each.get('choices', ())) or ''} | {each['help']} |\n"
        for each in options()
    )
    return f"| option | type | default | values | what it does |\n|---|---|---|---|---|\n{rows}"


def files() -> dict[Path, str]:
    """What the files must hold."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    return {
        SCHEMAS / "options.json": json.dumps(options(), indent=2) + "\n",
        SCHEMAS / "model.json": json.dumps(model(), indent=2) + "\n",
        OPTIONS_INC: options_inc(),
        PAGE: before + BEGIN + table() + END + rest.split(END)[1],
    }


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
    sys.exit()
