"""What each step of a folder was made with: which are done and whole, which go on, which must be made again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import ArtifactError
from ...base.files import sha256, write_json
from ...base.headers import read_json, verify
from ...base.notes import note

RECORD, FORMAT, VERSION = "student.json", "tformer-student", 1
SHORT = 40
"""Characters of a value that a message has; hashes have more."""


@dataclass(frozen=True)
class Step:
    """A part of the work, in a folder of its name."""

    name: str
    make: Callable[[Path, bool, bool], Mapping[str, Any]]
    """Makes the folder and returns what to record. Its flags: what is there may be replaced; it is to be continued."""
    files: Sequence[str]
    """Files whose hashes say that the folder is as it was made."""
    whole: Callable[[Path], object] = lambda folder: None
    """Raises ArtifactError for a damaged folder."""
    cheap: bool = False
    """Made again without `force` where the options have changed."""


class Record:
    """The steps of a folder, stored in it. A step without `files` has begun; one that is None is to be made again.

    Raises ArtifactError for a damaged file, unless `force` makes all of it again.
    """

    def __init__(self, out: Path, force: bool) -> None:
        self.out, self.force = out, force
        self.steps: dict[str, Any] = {}
        if (out / RECORD).exists():
            self.steps = _read(out, force)

    def run(self, step: Step, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make a step unless it is made; returns what is recorded. `options`: all that decides what it makes, by name.

        Raises ArtifactError for one that is damaged, or was made with other options.
        """
        folder, asked = self.out / step.name, json.loads(json.dumps(options))
        kept = self.steps.get(step.name)
        if kept and "files" not in kept and not any(each.is_file() for each in folder.rglob("*")):
            kept = None  # nothing was made yet
        if kept and (why := _unlike(step, folder, kept, asked)):
            if not self.force and not step.cheap:
                raise ArtifactError(f"{why} --force to make it and what follows it again")
            self._forget(step.name)
            kept = None
        if kept and "files" in kept:
            note(f"{folder}: made already")
            return dict(kept)
        replaces = step.name in self.steps or self.force
        note(f"{folder}: {'continued' if kept else 'begun'}")
        self._write(step.name, {"options": asked})
        made = step.make(folder, replaces, bool(kept))
        found = {"options": asked, "files": {name: sha256(folder / name) for name in step.files}, **made}
        self._write(step.name, found)
        return found

    def _forget(self, name: str) -> None:
        """What this step and all later ones made is to be made again."""
        names = [*self.steps]
        self.steps.update(dict.fromkeys(names[names.index(name) :]))

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        self.steps[name] = dict(value)
        write_json(self.out / RECORD, {"format": FORMAT, "version": VERSION, "steps": self.steps})


def _read(out: Path, force: bool) -> dict[str, Any]:
    """What each step was made with. With `force`, what cannot be read is nothing."""
    try:
        found = read_json(out, RECORD)
        if isinstance(found, dict) and (found.get("format"), found.get("version")) == (FORMAT, VERSION):
            return dict(found["steps"])
        why = f"{out / RECORD} is not of this command's version {VERSION}: choose another --out"
    except ArtifactError as error:
        why = str(error)
    if force:
        return {}
    raise ArtifactError(f"{why}, or add --force to make all steps again")


def _unlike(step: Step, folder: Path, kept: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Why what is there cannot be used, as far as the words before `--force`; empty: it can."""
    old = kept["options"]
    if other := [name for name in {**old, **asked} if old.get(name) != asked.get(name)]:
        return f"{folder} was made {', '.join(_given(name, old) for name in other)}: give that, or another --out, or"
    try:
        verify(folder, kept.get("files", {}), "step")
        if "files" in kept:
            step.whole(folder)
    except ArtifactError as error:
        return f"{error}, or add"
    return ""


def _given(name: str, options: Mapping[str, Any]) -> str:
    """An option as it was; `another` where its value says nothing to a reader, such as the hash of a text."""
    if (value := options.get(name)) is None:
        return f"without {name}"
    short = isinstance(value, str | int | float) and len(str(value)) <= SHORT
    return f"with {name} {value}" if short else f"with another {name}"
