"""Settings as frozen dataclasses: built from a table or from texts, with types and bounds checked."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
from collections.abc import Mapping
from textwrap import dedent
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from .errors import ConfigError, unknown

C = TypeVar("C")


HINTS: dict[type[Any], dict[str, Any]] = {}
"""Types of the fields of classes; finding them takes most of the time of a check."""


def type_hints(cls: type[Any]) -> dict[str, Any]:
    """The types of a class's fields."""
    if cls not in HINTS:
        HINTS[cls] = get_type_hints(cls)
    return HINTS[cls]


def from_dict(cls: type[C], values: Mapping[str, Any], where: str) -> C:
    """Build a config dataclass from parsed TOML or JSON, refusing unknown keys by their nearest valid name."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"[{where}]: must be a table, got {values!r}")
    valid = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in valid:
            raise unknown(f"key of [{where}]", key, valid)
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"[{where}]: {error}") from None


def parse_settings(cls: type[Any], where: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Parse `key=value` texts to the types of a config's fields."""
    hints = type_hints(cls)
    for key in settings:
        if key not in hints:
            raise unknown(f"key of [{where}]", key, hints)
    return {key: _parse(f"{where}.{key}", text, hints[key]) for key, text in settings.items()}


def _parse(name: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{name}={text:.60}: must be true or false")
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return kind(text if text.isascii() and "_" not in text else "")  # other digits, and 1_0, are Python's alone
        except ValueError:
            raise ConfigError(f"{name}={text:.60}: must be {'a whole number' if kind is int else 'a number'}") from None
    if get_origin(kind) is tuple:
        if not text:
            return ()
        if get_origin(get_args(kind)[0]) is tuple:
            return tuple(_parse(name, part, tuple[int, ...]) for part in text.split("/"))
        return tuple(_parse(name, part, int) for part in text.split(","))
    return text


MOST_FLOAT = 1e300
"""A whole number for a float field must be smaller: near 1.8e308 it does not fit."""


def check_types(config: Any) -> None:
    """Check each field of a config against its annotation: int, float, bool, str, Literal or tuples of ints."""
    for name, kind in type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(kind) is tuple:
            object.__setattr__(config, name, _whole_numbers(name, value, kind))
        elif get_origin(kind) is Literal:
            choices = get_args(kind)
            if value not in choices:
                raise unknown(name, str(value), choices)
        elif kind is float and type(value) is int:
            if abs(value) > MOST_FLOAT:
                raise ConfigError(f"{name}: must be at most {MOST_FLOAT:g}")
            object.__setattr__(config, name, float(value))
        elif kind in (int, float, bool, str) and type(value) is not kind:
            raise ConfigError(f"{name}={value!r}: must be of type {kind.__name__}")
        if kind is float and not math.isfinite(getattr(config, name)):
            raise ConfigError(f"{name}={value}: must be a finite number")


def _whole_numbers(name: str, value: Any, kind: Any) -> tuple[Any, ...]:
    nested = get_origin(get_args(kind)[0]) is tuple
    lists = value if nested and isinstance(value, (tuple, list)) else [value]
    if any(not isinstance(each, (tuple, list)) or any(type(item) is not int for item in each) for each in lists):
        raise ConfigError(f"{name}={value!r}: must be a list of {'lists of ' if nested else ''}whole numbers")
    return tuple(map(tuple, lists)) if nested else tuple(value)


def check_whole(name: str, value: Any, least: int, most: int) -> None:
    """Raise ConfigError unless a value is a whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{name}={value!r}: must be a whole number from {least} to {most}")


def at_least(config: Any, name: str, low: int) -> None:
    """Raise ConfigError for a field below `low`."""
    if getattr(config, name) < low:
        raise ConfigError(f"{name}={getattr(config, name)}: must be at least {low}")


def at_most(config: Any, name: str, high: int) -> None:
    """Raise ConfigError for a field above `high`."""
    if getattr(config, name) > high:
        raise ConfigError(f"{name}={getattr(config, name)}: must be at most {high}")


def field_texts(cls: type[Any]) -> dict[str, str]:
    """The text under each field of a class; none where its source is not there."""
    try:
        [tree] = ast.parse(dedent(inspect.getsource(cls))).body
    except OSError:
        return {}
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
