"""Runs a user's Python file, and identifies the model that its function returns. Only files that the user names run."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ...base.errors import ConfigError, unknown
from ...base.files import sha256
from ...base.notes import note
from ...bundle.text import Tokenizers
from ..config import ModelConfig
from ..seq2seq import Seq2Seq
from .probe import calling, looks_ahead, wrapped
from .recompute import Recomputed
from .user_model import UserModel, lacking

FUNCTION = re.compile(r"(?P<file>.+\.py)(:(?P<name>\w*))?")


def names_function(path: Path) -> bool:
    """Whether a path is `FILE.py:FUNCTION`, and no folder."""
    return FUNCTION.fullmatch(str(path)) is not None and not path.is_dir()


@dataclass(frozen=True)
class UserCheckpoint:
    """What a function returned, with the fields of `checkpoint.Checkpoint`: config, tokenizers and weights."""

    directory: Path
    """`FILE.py:FUNCTION`."""
    config: ModelConfig
    tokenizers: Tokenizers
    model: Seq2Seq
    weights_sha256: str
    tokenizer_hashes: dict[str, str]
    decoding: dict[str, Any]

    def load_model(self) -> Seq2Seq:
        """The module, in eval mode."""
        return self.model.eval()

    @property
    def paths(self) -> list[Path]:
        """The Python file."""
        return [file_of(self.directory)[0]]

    @property
    def encodes(self) -> bool:
        """Whether the module has an encoder of its own."""
        return getattr(self.model, "encodes", True)

    @property
    def notes_attention(self) -> bool:
        """Whether a step of the module can note its attention."""
        return getattr(self.model, "notes_attention", True)

    @property
    def advice(self) -> str:
        """Arguments of `UserModel` that would make steps faster; empty if there are none."""
        if not isinstance(self.model, Recomputed) or not self.config.decoder_layers:
            return ""
        missing = "" if self.model.config.decoder_layers > 1 else "layers=, self_attention="
        missing = missing if self.model.user.encode else f"encode=, decode={missing and ', '}{missing}"
        return missing

    @property
    def looks_ahead(self) -> bool:
        """Whether a token's score depends on later tokens. Steps with caches see none."""
        model: Any = self.model
        return type(model) is Recomputed and looks_ahead(model)


def open_user_model(path: Path) -> UserCheckpoint:
    """Run a file, call its function and probe the module that it returns. Raises TformerError."""
    file, name = file_of(path)
    user = run_function(file, name, str(path))
    with calling(str(path), "its module"):
        model = wrapped(user, str(path))
        tokenizers = user.tokenizers(model.config, file.parent)
        weights = weights_sha256(cast(nn.Module, model), model.config)
    with tempfile.TemporaryDirectory() as folder:
        tokenizers.save(Path(folder))
        hashes = {each.name: sha256(each) for each in sorted(Path(folder).iterdir())}
    return UserCheckpoint(path, model.config, tokenizers, model, weights, hashes, dict(user.decoding))


def made_again(first: UserCheckpoint) -> UserCheckpoint:
    """Run the file once more. Raises ConfigError if weights or vocabularies differ from those of the first time."""
    again, where = open_user_model(first.directory), first.directory
    if again.weights_sha256 != first.weights_sha256:
        ours, theirs = (tensors_of(cast(nn.Module, each.model)) for each in (first, again))
        other = [name for name in sorted(ours) if name not in theirs or not torch.equal(ours[name], theirs[name])]
        share = f", {len(other)} of {len(ours)} tensors, such as {other[0].removeprefix('module.')}" if other else ""
        raise ConfigError(
            f"{where} gives other weights each time it runs{share}: load them from a file, or call torch.manual_seed "
            "before the module is made"
        )
    if again.tokenizer_hashes != first.tokenizer_hashes:
        raise ConfigError(f"{where} gives another vocabulary each time it runs: load it from a file, or sort it")
    return again


def file_of(path: Path) -> tuple[Path, str]:
    """File and function of `FILE.py:FUNCTION`. Raises ConfigError."""
    found = FUNCTION.fullmatch(str(path))
    assert found is not None
    if not Path(found["file"]).is_file():
        raise ConfigError(f"{found['file']}: no such file: check the path")
    if not found["name"]:
        raise ConfigError(f"{found['file']}: name the function that makes the model, as in {found['file']}:make")
    return Path(found["file"]), found["name"]


def run_function(file: Path, name: str, where: str) -> UserModel:
    """Run a file and call its function `name`. Raises ConfigError if that returns neither `UserModel` nor `Seq2Seq`."""
    note(f"running {file}")
    with imports_from(file.parent):
        specification = importlib.util.spec_from_file_location(f"tformer_user_{file.stem}", file)
        assert specification is not None and specification.loader is not None
        namespace = importlib.util.module_from_spec(specification)
        sys.modules[specification.name] = namespace  # dataclasses look their module up
        with calling(where, "the file"):
            specification.loader.exec_module(namespace)
        function = getattr(namespace, name, None)
        if not callable(function):
            raise unknown(f"function of {file}", name, [n for n, v in vars(namespace).items() if _is_own(v, namespace)])
        with calling(where, f"{name}()"):
            made = function()
    if isinstance(made, UserModel):
        return made
    if isinstance(made, nn.Module) and not lacking(made):
        return UserModel(made)
    if isinstance(made, nn.Module):
        raise ConfigError(
            f"{where} returned a {type(made).__name__}, which has no {', '.join(lacking(made))}: return "
            "tformer_deploy.UserModel(module, ..., forward=...), see docs/your-model.md"
        )
    raise ConfigError(f"{where} returned a {type(made).__name__}: return a tformer_deploy.UserModel")


def _is_own(value: Any, namespace: Any) -> bool:
    return callable(value) and getattr(value, "__module__", "") == namespace.__name__ and not isinstance(value, type)


@contextmanager
def imports_from(folder: Path) -> Iterator[None]:
    """Import from a folder first, as Python does for the script that it runs."""
    place = str(folder.resolve())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)


def weights_sha256(module: nn.Module, config: ModelConfig) -> str:
    """Hex SHA-256 of a config and of every tensor: names, types, shapes and bytes."""
    found = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for name, tensor in sorted(tensors_of(module).items()):
        found.update(f"{name} {str(tensor.dtype)[6:]} {tuple(tensor.shape)}\n".encode())
        # As bytes: numpy has no bfloat16.
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor by its name. A state dict may also have what `get_extra_state` returns, of any type."""
    named = {**dict(module.named_buffers()), **module.state_dict()}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
