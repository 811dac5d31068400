"""Tensors of other tools' files, read one by one; nothing that a file names is executed."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ArtifactError
from ..headers import DAMAGED, JSON_BYTES, RATIO, parse_json, require_here

Read = Callable[[], Tensor]
WRAPPERS = ("module.", "model.", "_orig_mod.")
"""What DataParallel, Lightning and torch.compile put before names."""


class Weights:
    """The tensors of a checkpoint by their names, and which of them have been taken."""

    def __init__(self, where: Path, tensors: Mapping[str, Read], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.where, self.shapes = where, dict(shapes)
        """`shapes`: of every tensor, without reading it."""
        self._tensors, self._taken = dict(tensors), set[str]()

    @classmethod
    def of(cls, where: Path, tensors: Mapping[str, Tensor]) -> Weights:
        """Tensors that are in memory, or mapped into it."""
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
        """A tensor in float32. Raises ArtifactError for one that is missing or holds what is no number."""
        self.shape(name)
        self._taken.add(name)
        tensor = self._tensors[name]().detach()
        if not tensor.is_floating_point():
            raise ArtifactError(f"{self.where}: tensor '{name}' is {str(tensor.dtype)[6:]}, not floating point")
        tensor = tensor.float()
        # Unlike isfinite, this makes no copies of a table of gigabytes.
        if tensor.numel() and not all(value.isfinite() for value in torch.aminmax(tensor)):
            raise ArtifactError(f"{self.where}: tensor '{name}' has values that are no numbers: it is damaged")
        return tensor

    def ignore(self, *names: str) -> None:
        """Say that tensors are not needed, where they are there."""
        self._taken.update(names)

    def left(self) -> list[str]:
        """Names of the tensors that nobody took."""
        return [name for name in self.shapes if name not in self._taken]

    def layers(self, pattern: str) -> int:
        """How many layers there are: `pattern` has `{}` where a tensor of each has its number, from 0."""
        count = 0
        while pattern.format(count) in self.shapes:
            count += 1
        return count


def read_weights(path: Path, *prefixes: str) -> Weights:
    """The tensors of a .safetensors, .pt, .pth, .bin or .ckpt file; of names that begin so, the rest of them.

    Raises ArtifactError, also for what would have to be executed.
    """
    require_here(path)
    if path.suffix == ".safetensors":
        weights = _safetensors(path, [path])
    else:
        weights = Weights.of(path, state_dict(path, load_torch(path)))
    for prefix in prefixes:
        if weights.shapes and all(name.startswith(prefix) for name in weights):
            weights = renamed(weights, lambda name, prefix=prefix: name.removeprefix(prefix))  # type: ignore[misc]
    return weights


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
    """A file of a source's folder, which may be a link, as in the cache of Hugging Face. Raises ArtifactError."""
    if Path(name).name != name:
        raise ArtifactError(f"{directory} names a file outside it, {name!r:.80}: copy it again")
    if not (directory / name).is_file():
        raise ArtifactError(f"{directory} is incomplete: {name} is missing; copy or make it again")
    require_here(directory / name)
    return directory / name


def renamed(weights: Weights, rename: Callable[[str], str]) -> Weights:
    """The same tensors by other names."""
    tensors = {rename(name): read for name, read in weights._tensors.items()}
    return Weights(weights.where, tensors, {rename(name): shape for name, shape in weights.shapes.items()})


def _safetensors(where: Path, paths: Iterable[Path]) -> Weights:
    tensors: dict[str, Read] = {}
    shapes = {}
    for path in paths:
        try:
            file: Any = safe_open(path, "pt")
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


def load_torch(path: Path, allowed: Iterable[Any] = ()) -> Any:
    """What torch.save wrote, mapped into memory; only plain types and those of `allowed`. Raises ArtifactError."""
    if not path.is_file():
        raise ArtifactError(f"{path} is not there")
    require_here(path)
    mapped = _checked_zip(path)
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ArtifactError(f"{path} is refused: {_refused(str(error))}") from None
    except DAMAGED as error:
        said = str(error).partition("\n")[0] or "it ends early"
        raise ArtifactError(f"{path} is damaged: {said:.200}: copy it again") from None


def _refused(message: str) -> str:
    """What a file would have had executed, from what torch says of it."""
    for begin, end in (("GLOBAL ", " was not"), ("class ", " ")):
        if begin in message:
            name = message.split(begin, 1)[1].split(end, 1)[0]
            return f"loading it would execute {name}: save model.state_dict() alone, without other objects"
    said = message.partition("\n")[0]
    return f"{said:.200}: save model.state_dict() alone, without other objects"


def _checked_zip(path: Path) -> bool:
    """Whether a file is a zip, as torch writes them. Raises ArtifactError for one that unpacks to much more."""
    if not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except DAMAGED as error:
        raise ArtifactError(f"{path} is damaged: {error}: copy it again") from None
    for part in parts:
        if part.file_size > max(1 << 20, RATIO * part.compress_size):
            raise ArtifactError(f"{path} is refused: {part.filename} unpacks to {part.file_size} bytes")
    return True


def load_plain_pickle(path: Path) -> Any:
    """A pickle of dicts, lists, texts and numbers; anything else is refused. Raises ArtifactError."""

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) == ("collections", "OrderedDict"):
                return dict
            raise pickle.UnpicklingError(f"{module}.{name}")

    if path.stat().st_size > 64 << 20:
        raise ArtifactError(f"{path} is larger than 64 MiB: is it a vocabulary?")
    try:
        with path.open("rb") as file:
            return Plain(file).load()
    except pickle.UnpicklingError as error:
        found = f"{path} is refused: loading it would execute {error}"
        raise ArtifactError(f"{found}: write the words to a text file, one a line") from None
    except DAMAGED as error:
        raise ArtifactError(f"{path} is damaged: {error!r:.200}: copy it again") from None


def read_json_file(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ArtifactError."""
    require_here(path)
    try:
        if path.stat().st_size > JSON_BYTES:
            raise ValueError(f"it has more than {JSON_BYTES} bytes")
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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
