"""Tensors of other tools' files, read one by one; nothing that a file names is executed."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..base.errors import ArtifactError
from ..base.headers import DAMAGED, JSON_BYTES, RATIO, content, parse_json, readable
from .pickles import require_flat

Read = Callable[[], Tensor]
WRAPPERS = ("module.", "model.", "_orig_mod.")
"""What DataParallel, Lightning and torch.compile put before names."""
PICKLES = 5
"""Of a file without a zip: a number, a version, sizes, what was saved, names of its tensors' storages."""


class Weights:
    """The tensors of a checkpoint by name; remembers which ones were used."""

    def __init__(self, where: Path, tensors: Mapping[str, Read], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.where, self.shapes = where, dict(shapes)
        """`shapes`: of every tensor, without reading it."""
        self._tensors, self._taken = dict(tensors), set[str]()

    @classmethod
    def of(cls, where: Path, tensors: Mapping[str, Tensor]) -> Weights:
        """Wrap tensors that are in memory or memory-mapped."""
        return cls(
            where,
            {name: lambda tensor=tensor: tensor for name, tensor in tensors.items()},  # type: ignore[misc]
            {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        )

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def shape(self, name: str, axes: int | None = None) -> tuple[int, ...]:
        """A tensor's shape. Raises ArtifactError where there is none of that name, or with other than so many axes."""
        if name not in self.shapes:
            raise ArtifactError(f"{self.where} has no tensor '{name}': is it of another format or version?")
        if axes not in (None, len(self.shapes[name])):
            raise ArtifactError(f"{self.where}: tensor '{name}' is of shape {self.shapes[name]}: must have {axes} axes")
        return self.shapes[name]

    def take(self, name: str) -> Tensor:
        """A tensor in float32. Raises ArtifactError if it is missing, or has NaN or infinite values."""
        self.shape(name)
        self._taken.add(name)
        tensor = self._tensors[name]().detach()
        if not tensor.is_floating_point():
            raise ArtifactError(f"{self.where}: tensor '{name}' is {str(tensor.dtype)[6:]}, not floating point")
        tensor = tensor.float()
        # Unlike isfinite, this makes no copies of a table of gigabytes.
        if tensor.numel() and not all(value.isfinite() for value in torch.aminmax(tensor)):
            raise ArtifactError(f"{self.where}: tensor '{name}' has NaN or infinite values: copy it again")
        return tensor

    def ignore(self, *names: str) -> None:
        """Mark tensors, if present, as not needed."""
        self._taken.update(names)

    def left(self) -> list[str]:
        """Unused tensor names."""
        return [name for name in self.shapes if name not in self._taken]

    def layers(self, pattern: str) -> int:
        """How many layers there are: `pattern` has `{}` where a tensor of each has its number, from 0."""
        count = 0
        while pattern.format(count) in self.shapes:
            count += 1
        return count


def read_weights(path: Path, *prefixes: str) -> Weights:
    """The tensors of a file of safetensors or torch.save; a prefix that all names share is removed.

    Raises ArtifactError, also for what would have to be executed.
    """
    if kind_of(path) == "safetensors":
        weights = _safetensors(path, [path])
    else:
        weights = Weights.of(path, state_dict(path, load_torch(path)))
    short = without(weights, *prefixes)
    return renamed(weights, dict(zip(weights, short, strict=True)).__getitem__)


def without(names: Iterable[str], *prefixes: str) -> list[str]:
    """Remove those of some prefixes that all names share."""
    found = list(names)
    for prefix in prefixes:
        if all(name.startswith(prefix) for name in found):
            found = [name.removeprefix(prefix) for name in found]
    return found


def kind_of(path: Path) -> str:
    """The format by a file's first bytes: `safetensors`, `npz`, `marian`, `torch`, or empty. Raises ArtifactError."""
    with readable(path).open("rb") as file:
        head = file.read(64)
        if _of_marian(head, file):
            return "marian"
    number = int.from_bytes(head[:8], "little")
    if path.suffix == ".safetensors" or (head[8:9] == b"{" and number < path.stat().st_size):
        return "safetensors"
    if head[:4] == b"PK\x03\x04" and zipfile.is_zipfile(path):
        return "npz" if any(part.filename.endswith(".npy") for part in _parts(path)) else "torch"
    return "torch" if head[:1] == b"\x80" else ""


def _of_marian(head: bytes, file: IO[bytes]) -> bool:
    """Whether a file begins with a version, 1, a number of tensors, four numbers for each, and their names.

    Source: marian-dev, src/common/binary.cpp.
    """
    version, count, size = (int.from_bytes(head[i : i + 8], "little") for i in (0, 8, 16))
    if version != 1 or not 0 < count < 1 << 20 or not 1 < size < 1 << 10:
        return False
    file.seek(16 + 32 * count)
    name = file.read(size)
    return len(name) == size and name[-1:] == b"\0" and name[:-1].isascii() and name[:-1].decode().isprintable()


def read_folder(directory: Path) -> Weights:
    """The tensors of a Hugging Face folder: one file or shards with an index, safetensors before .bin."""
    for stem, read in (("model.safetensors", _safetensors), ("pytorch_model.bin", _bins)):
        index = directory / f"{stem}.index.json"
        if index.is_file():
            listed = read_json_file(index).get("weight_map", {})
            if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
                raise ArtifactError(f"{index} has no weight_map: copy the folder again")
            return read(directory, [file_in(directory, name) for name in sorted(set(listed.values()))])
        if (directory / stem).is_file():
            return read(directory, [file_in(directory, stem)])
    raise ArtifactError(f"{directory} has no model.safetensors and no pytorch_model.bin: download its weights too")


def file_in(directory: Path, name: str) -> Path:
    """A file of a source's folder; it may be a link, as in Hugging Face's cache. Raises ArtifactError."""
    if Path(name).name != name:
        raise ArtifactError(f"{directory} names a file outside it, {name!r:.80}: copy it again")
    if not (directory / name).exists():
        raise ArtifactError(f"{directory} is incomplete: {name} is missing; copy or make it again")
    return readable(directory / name)


def renamed(weights: Weights, rename: Callable[[str], str]) -> Weights:
    """The same tensors by other names."""
    tensors = {rename(name): read for name, read in weights._tensors.items()}
    return Weights(weights.where, tensors, {rename(name): shape for name, shape in weights.shapes.items()})


def _safetensors(where: Path, paths: Iterable[Path]) -> Weights:
    tensors: dict[str, Read] = {}
    shapes = {}
    for path in paths:
        try:
            file: Any = safe_open(readable(path), "pt")
            for name in list(file.keys()):
                tensors[name] = partial(_safetensor, path, name)
                shapes[name] = tuple(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{path} cannot be read: {error}: copy it again") from None
    return Weights(where, tensors, shapes)


def _safetensor(path: Path, name: str) -> Tensor:
    """One tensor. The file is mapped anew for each, so that its pages do not pile up in memory."""
    file: Any = safe_open(path, "pt")
    return file.get_tensor(name)  # type: ignore[no-any-return]


def _bins(where: Path, paths: Iterable[Path]) -> Weights:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= state_dict(path, load_torch(path))
    return Weights.of(where, tensors)


def state_dict(path: Path, loaded: Any) -> dict[str, Tensor]:
    """The tensors of what a .pt file holds: a state dict, or one under a usual name. Raises ArtifactError."""
    for key in ("state_dict", "model_state_dict", "model_state", "model", "net", "params"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping):
        raise ArtifactError(f"{path} holds a {type(loaded).__name__}, not a state dict: save model.state_dict()")
    tensors = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ArtifactError(f"{path} holds no tensors: save model.state_dict()")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
            raise ArtifactError(f"{path}: tensor '{name}' has no values of its own: save it as a dense tensor")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ArtifactError(f"{path}: tensor '{name}' repeats its values: save it with .contiguous()")
    return tensors


def load_parts(path: Path) -> dict[str, Any]:
    """The parts of a file of torch.save, which may hold argparse's options. Raises ArtifactError."""
    parts = load_torch(path)
    if not isinstance(parts, Mapping):
        raise ArtifactError(f"{path} holds a {type(parts).__name__}, not the parts of a checkpoint")
    return {str(name): part for name, part in parts.items()}


def load_torch(path: Path) -> Any:
    """What torch.save wrote, mapped into memory; only plain types and argparse's options. Raises ArtifactError."""
    kind = kind_of(path)
    if kind in ("safetensors", "npz", "marian"):
        raise ArtifactError(f"{path} is a file of {kind}, not of torch.save: name its format, or let import find it")
    mapped = zipfile.is_zipfile(path)
    try:
        _require_flat(path, mapped)
        with torch.serialization.safe_globals([Namespace]), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ArtifactError(f"{path} is refused: {_refused(str(error))}") from None
    except DAMAGED as error:
        said = str(error).partition("\n")[0] or "it ends early"
        if "TorchScript" in said:
            raise ArtifactError(f"{path} is a program of TorchScript: save model.state_dict()") from None
        raise ArtifactError(f"{path} is damaged: {_without_advice(said)}: copy it again") from None


def _refused(message: str) -> str:
    """Say what a pickle wanted to execute, from torch's message."""
    for begin, end in (("GLOBAL ", " was not"), ("class ", " ")):
        if begin in message:
            name = message.split(begin, 1)[1].split(end, 1)[0]
            return f"loading it would execute {name}: save model.state_dict() alone, without other objects"
    said = message.rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]
    return f"{_without_advice(said)}: save model.state_dict() alone, without other objects"


def _without_advice(said: str) -> str:
    """torch's message without its advice to load the file unsafely."""
    return "it holds what is not plain" if "weights_only" in said else f"{said:.200}"


def _parts(path: Path) -> list[zipfile.ZipInfo]:
    """The parts of a zip. Raises ArtifactError for one that unpacks to much more."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except DAMAGED as error:
        raise ArtifactError(f"{path} is damaged: {error}: copy it again") from None
    for part in parts:
        if part.file_size > max(1 << 20, RATIO * part.compress_size):
            raise ArtifactError(f"{path} is refused: {part.filename} unpacks to {part.file_size} bytes")
    return parts


def _require_flat(path: Path, zipped: bool) -> None:
    """Look at each pickle of a file: before version 1.6, torch wrote some one behind the other. Raises as it does."""
    if not zipped:
        with path.open("rb") as file:
            for i in range(PICKLES):
                if i and not file.read(1):
                    raise ValueError("it is a pickle, not a file of torch.save")
                file.seek(-1 if i else 0, 1)
                require_flat(file)
        return
    with zipfile.ZipFile(path) as archive:
        for part in _parts(path):
            if part.filename.endswith(".pkl"):
                with archive.open(part) as file:
                    require_flat(file)


def read_json_file(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ArtifactError."""
    text = content(path, JSON_BYTES)
    try:
        found = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read: {error}: copy it again") from None
    if not isinstance(found, dict):
        raise ArtifactError(f"{path} is no JSON object: copy it again")
    return found


@contextmanager
def writing(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Callable[[str, Tensor], None]]:
    """Write a safetensors file tensor by tensor, in the order of `shapes`; yields what writes one."""
    header, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)

        def write(name: str, tensor: Tensor) -> None:
            assert tuple(tensor.shape) == shapes[name], name
            file.write(tensor.contiguous().numpy().data)

        yield write
