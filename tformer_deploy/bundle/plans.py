"""TensorRT plans in a bundle: what each was compiled for, and which one fits a host and a request."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError, ConfigError, LimitError
from ..base.files import sha256
from ..base.headers import read_header, verify, within
from .contract import GRAPHS
from .manifest import Bundle
from .recipe import Axes

FOLDER, HEADER, VERSION = "plans", "plans.json", 1
PRECISIONS = ("fp16", "bf16", "fp32")
"""In the order in which plans are looked for."""


@dataclass(frozen=True, order=True)
class Profile:
    """The sizes that a plan is compiled for; smaller requests are padded to them."""

    batch: int
    """Sentences."""
    beams: int
    src_len: int
    """Source tokens."""
    capacity: int
    """Target positions."""

    def __str__(self) -> str:
        return f"{self.batch}x{self.beams}x{self.src_len}x{self.capacity}"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a step of kind `device_search`, by the names of `contract.SIZES`."""
        rows = self.batch * self.beams
        return {**asdict(self), "rows": rows, "past_rows": rows, "best": 2 * self.beams}

    def check(self, axes: Axes) -> None:
        """Raise LimitError where an axis of the recipe does not allow a size."""
        allowed = {"batch": axes.batch, "beams": axes.beams, "src_len": axes.src_len}
        for name, axis in allowed.items():
            size = getattr(self, name)
            if not axis.min <= size <= axis.max:
                raise LimitError(
                    f"profile {self}: {name} {size} is outside {axis.min}..{axis.max} of the recipe's axis: "
                    f"choose another or export with another recipe"
                )
        if not 1 <= self.capacity <= axes.past_len.max + 1:
            raise LimitError(
                f"profile {self}: {self.capacity} target positions are outside 1..{axes.past_len.max + 1}: "
                "choose another or export with another recipe"
            )


def parse_profile(text: str) -> Profile:
    """`8x4x64x128`: batch, beams, source tokens, target positions. Raises ConfigError."""
    if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8}){3}", text):
        raise ConfigError(f"profile '{text}': write BATCHxBEAMSxSOURCExTARGET, such as 8x4x64x128")
    return Profile(*map(int, text.split("x")))


@dataclass(frozen=True)
class Stamp:
    """What the plans of a folder were compiled for."""

    capability: str
    """Compute capability, such as `sm90`, or `sm80+` for a plan that also runs on every later GPU."""
    tensorrt: str
    """Flavor and version, such as `TensorRT 11.4.0`."""
    precision: str

    def __str__(self) -> str:
        return f"{self.capability}, {self.tensorrt}, {self.precision}"

    @property
    def folder(self) -> str:
        """Name of the folder under `plans`."""
        capability = self.capability.replace("+", "-and-up")
        return f"{capability}-{re.sub(r'[^a-z0-9.]+', '-', self.tensorrt.lower())}-{self.precision}"


@dataclass(frozen=True)
class Plans:
    """An opened and verified folder of plans."""

    bundle: Path
    directory: Path
    header: dict[str, Any]

    @property
    def stamp(self) -> Stamp:
        """What they were compiled for."""
        return Stamp(self.header["capability"], self.header["tensorrt"], self.header["precision"])

    @property
    def profiles(self) -> list[Profile]:
        """Smallest first."""
        return sorted(parse_profile(name) for name in self.header["profiles"])

    @property
    def identity(self) -> str:
        """A hash of the plans, independent of where they are."""
        return hashlib.sha256(json.dumps(self.header["files"], sort_keys=True).encode()).hexdigest()[:16]

    def plan(self, graph: str, profile: Profile) -> Path:
        """The file of one plan."""
        return self.directory / plan_file(graph, profile)

    def fitting(self, wanted: Profile) -> Profile:
        """The profile with the fewest rows, then the shortest, that fits a request. Raises LimitError."""
        sizes = asdict(wanted)
        fits = [p for p in self.profiles if all(getattr(p, name) >= size for name, size in sizes.items())]
        if fits:
            return min(fits, key=lambda p: (p.batch * p.beams, p.src_len, p.capacity))
        command = build_command(self.bundle, self.stamp.precision, [*self.profiles, wanted])
        for name, size in sizes.items():
            largest = max(getattr(profile, name) for profile in self.profiles)
            if size > largest:
                raise LimitError(f"{name} {size} exceeds the plans' largest, {largest}: {command}")
        raise LimitError(
            f"no plan takes {wanted} (batch, beams, source, target): there are "
            f"{', '.join(map(str, self.profiles))}: {command}"
        )


def trt_variant(bundle: Bundle) -> str:
    """The variant with graphs for TensorRT. Raises ConfigError where there is none, ArtifactError for unknown kinds."""
    bundle.require_decoder()
    for name, recipe in bundle.variants.items():
        if recipe.target == "trt":
            bundle.require_kinds(name)
            return name
    raise ConfigError(f"{bundle.directory} has no graphs for TensorRT: export it again and add --recipe trt")


def build_command(bundle: Path, precision: str, profiles: Iterable[Profile] = ()) -> str:
    """The command that builds plans; it names all profiles, as it replaces all plans of its stamp."""
    text = "" if precision == "fp32" else " --src FILE"
    return f"tformer build {bundle} --precision {precision}{text}" + "".join(f" --profile {each}" for each in profiles)


def plan_file(graph: str, profile: Profile) -> str:
    """Name of a plan's file."""
    return f"{graph}-{profile}.plan"


def plans_header(bundle: Bundle, variant: str, stamp: Stamp, profiles: Iterable[Profile]) -> dict[str, Any]:
    """The header of a folder of plans: what they were compiled for, and from which graphs."""
    files = bundle.manifest["files"]
    return {
        "format": "tformer-plans",
        "version": VERSION,
        **asdict(stamp),
        "graphs": {name: files[name] for name in bundle.graph_files(variant)},
        "profiles": [str(profile) for profile in profiles],
    }


def find_plans(bundle: Bundle, variant: str, wanted: Sequence[Stamp]) -> Plans:
    """The first plans of `wanted`, what a host can run, that the bundle has; verified.

    Raises ArtifactError that names what there is and what is needed.
    """
    folder = bundle.directory / variant / FOLDER
    for stamp in wanted:
        if (folder / stamp.folder / HEADER).is_file():
            return open_plans(bundle, variant, folder / stamp.folder)
    found = "; ".join(map(str, _readable_stamps(bundle, variant)))
    raise ArtifactError(
        f"{bundle.directory} has no plans for this host ({wanted[0]}), it has {found or 'none at all'}: "
        f"run here: {build_command(bundle.directory, wanted[0].precision)}"
    )


def all_plans(bundle: Bundle, variant: str) -> list[Plans]:
    """Every folder of plans, verified. Raises ArtifactError."""
    return [open_plans(bundle, variant, folder) for folder in _folders(bundle, variant)]


def _folders(bundle: Bundle, variant: str) -> list[Path]:
    headers = (bundle.directory / variant / FOLDER).glob(f"[!.]*/{HEADER}")  # hidden: of a running build
    return sorted(header.parent for header in headers)


def _readable_stamps(bundle: Bundle, variant: str) -> list[Stamp]:
    """What the plans of each folder with a valid header were compiled for. The plans are not verified."""
    found = []
    for folder in _folders(bundle, variant):
        with suppress(ArtifactError):
            found.append(_read_plans(bundle, folder).stamp)
    return found


def _read_plans(bundle: Bundle, directory: Path) -> Plans:
    """The header of a folder of plans, which are not verified. Raises ArtifactError."""
    header = read_header(within(bundle.directory, directory.relative_to(bundle.directory)), HEADER, "plans", VERSION)
    return Plans(bundle.directory, directory, header)


def open_plans(bundle: Bundle, variant: str, directory: Path) -> Plans:
    """Open plans; checks their folder, hashes and graphs. Raises ArtifactError."""
    plans = _read_plans(bundle, directory)
    header = plans.header
    command = build_command(bundle.directory, plans.stamp.precision, plans.profiles)
    if plans.stamp.folder != directory.name:
        own = plans.stamp.folder
        raise ArtifactError(f"{directory} has plans for {plans.stamp}: call it {own} again, or remove it")
    if header["graphs"] != {name: bundle.manifest["files"][name] for name in bundle.graph_files(variant)}:
        raise ArtifactError(f"{directory} was compiled from other graphs than the bundle's: {command}")
    names = {plan_file(graph, profile) for profile in plans.profiles for graph in GRAPHS}
    if missing := names - set(header["files"]):
        raise ArtifactError(f"{directory / HEADER} is damaged: no hash of {min(missing)}: {command}")
    try:
        verify(directory, {name: header["files"][name] for name in sorted(names)}, "plans")
    except ArtifactError as error:
        raise ArtifactError(f"{error}: {command}") from None
    return plans


def file_hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of the plans in a folder."""
    return {path.name: sha256(path) for path in sorted(directory.glob("*.plan"))}
