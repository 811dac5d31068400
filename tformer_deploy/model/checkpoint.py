"""A checkpoint directory: checkpoint.json (the header), a tokenizer, weights as safetensors. No pickle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import __version__
from ..base import machine
from ..base.errors import ArtifactError, ConfigError, OtherTokenizers
from ..base.files import atomic_file, sha256, write_json
from ..base.headers import digest, read_header, verify
from ..base.machine import GIB
from ..base.settings import from_dict
from ..bundle.manifest import Bundle, tokenizer_hashes
from ..bundle.text import Tokenizers, load_tokenizers, tokenizer_files
from .config import ModelConfig
from .modules.running import UserCheckpoint, names_function, open_user_model
from .network import Transformer

HEADER, VERSION = "checkpoint.json", 3
"""Version 1 has no SHA-256 of the header itself, version 2 no special ids of the tokenizers."""
FP32_BYTES = 4
TRAINING_COPIES = 4
"""Weights, gradients, and two moments of Adam."""
LEARNED = ".log_step"
"""End of the names of further tensors in a run's weights, see `train.quantized`; the header has these `steps`."""


def require_memory(config: ModelConfig, what: str, copies: int = 1, beside: ModelConfig | None = None) -> None:
    """Raise ConfigError if `copies` of a model's weights, and one of the model `beside` it, exceed the free memory.

    Do nothing if that is unknown.
    """
    models = [(config, copies), *([(beside, 1)] if beside else [])]
    tables = sum(each.max_positions * sum({each.encoder.width, each.decoder.width}) for each, _ in models)
    needed = FP32_BYTES * (tables + sum(count * each.parameters for each, count in models))
    free = machine.available_bytes()
    if free is not None and needed > free:
        parameters = " and ".join(f"{each.parameters:,}" for each, _ in models)
        raise ConfigError(
            f"{what} needs {needed / GIB:.1f} GiB of memory at least, for {parameters} parameters, and "
            f"{free / GIB:.1f} GiB are free: choose a smaller model or a machine with more"
        )


class Steps(NamedTuple):
    """Steps between two integers of 8 bits, -127 to 127, that a model was trained with. By the names of its layers."""

    inputs: Mapping[str, float]
    """Of linear layers."""
    weights: Mapping[str, float]
    """Of linear layers and tables of embeddings. Empty: each output has the least step without overflow."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened and verified checkpoint."""

    directory: Path
    config: ModelConfig
    tokenizers: Tokenizers
    header: dict[str, Any]

    @property
    def weights(self) -> Path:
        """The safetensors file that the header names."""
        return self.directory / str(self.header["weights"])

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the weights file, which identifies the model."""
        return str(self.header["files"][self.header["weights"]])

    @property
    def decoding(self) -> dict[str, Any]:
        """Default decoding options."""
        return dict(self.header.get("decoding", {}))

    @property
    def steps(self) -> Steps | None:
        """Of the rounding to 8 bits that the model was trained with, if any."""
        found = self.header.get("steps")
        return None if found is None else Steps(**found)

    @property
    def tokenizer_hashes(self) -> dict[str, str]:
        """SHA-256 of each tokenizer's file, by its name."""
        return tokenizer_hashes(self.header)

    @property
    def paths(self) -> list[Path]:
        """All files of the checkpoint."""
        return [self.directory / name for name in (HEADER, *self.header["files"])]

    def load_model(self) -> Transformer:
        """The model with its weights, in eval mode. Raises ArtifactError where they do not fit the config."""
        size = self.weights.stat().st_size
        if FP32_BYTES * self.config.parameters > size:  # before such a model takes memory
            raise ArtifactError(
                f"{self.weights} does not fit its config: {size} bytes cannot hold {self.config.parameters} "
                f"parameters of {FP32_BYTES} bytes"
            )
        require_memory(self.config, f"the model of {self.directory}")
        model = Transformer(self.config)
        load_weights(model, self.load_tensors(), self.weights)
        return model.eval()

    def load_tensors(self) -> dict[str, Tensor]:
        """The model's parameters by name. Raises ArtifactError."""
        return {name: tensor for name, tensor in load_tensors(self.weights).items() if not name.endswith(LEARNED)}


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as temporary:
        try:
            save_file(ready, temporary, {})
        except SafetensorError as error:
            raise ArtifactError(f"{path} cannot be written: {error}; make room or choose another folder") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises ArtifactError."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None


def model_tensors(model: Transformer) -> dict[str, Tensor]:
    """The model's parameters by name; shared ones appear once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def load_weights(model: Transformer, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Copy tensors into a model's parameters. Raises ArtifactError where names or shapes differ."""
    parameters = dict(model.named_parameters())
    if missing := sorted(parameters.keys() ^ tensors.keys()):
        raise ArtifactError(f"{where} does not fit its config: missing or unknown tensor '{missing[0]}'")
    for name, parameter in parameters.items():
        require_like(tensors[name], parameter, name, where)
        parameter.data.copy_(tensors[name])


def require_like(tensor: Tensor, parameter: Tensor, name: str, where: Path) -> None:
    """Raise ArtifactError if a stored tensor's shape or type differs from the parameter's."""
    if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
        found, wanted = (f"{tuple(each.shape)} {str(each.dtype)[6:]}" for each in (tensor, parameter))
        raise ArtifactError(f"{where} does not fit its config: '{name}' is {found}, expected {wanted}")


def save_checkpoint(
    directory: Path,
    config: ModelConfig,
    tokenizers: Tokenizers,
    weights: Path,
    training: Mapping[str, Any],
    decoding: Mapping[str, Any] | None = None,
    steps: Steps | None = None,
) -> None:
    """Make the weights file inside `directory` the checkpoint's. The header is written last, atomically.

    `training`: the origin of the weights; `decoding`, `steps`: see `Checkpoint`.
    """
    description = tokenizers.save(directory)
    name = weights.relative_to(directory).as_posix()
    header = {
        "format": "tformer-checkpoint",
        "version": VERSION,
        "tformer_deploy": __version__,
        "model": dataclasses.asdict(config),
        "tokenizer": description,
        "weights": name,
        "training": dict(training),
        **({"decoding": dict(decoding)} if decoding else {}),
        **({"steps": steps._asdict()} if steps else {}),
        "files": {file: sha256(directory / file) for file in [*tokenizer_files(description), name]},
    }
    write_json(directory / HEADER, {**header, "sha256": digest(header)})


def open_reference(bundle: Bundle, directory: Path | None = None) -> Checkpoint | UserCheckpoint:
    """The checkpoint that a bundle was exported from: at `directory`, or at the path recorded at export.

    A Python file runs only if `directory` names it, because the bundle may come from somebody else. Raises
    ArtifactError if there is no checkpoint, or its weights differ.
    """
    where = directory or bundle.checkpoint
    if directory is None and names_function(where):
        raise ArtifactError(
            f"eager PyTorch needs the module of {where}, which tformer runs only if you say so: --checkpoint {where}"
        )
    if not (where.is_dir() or names_function(where)):
        raise ArtifactError(f"eager PyTorch needs the checkpoint, which is not at {where}: name it with --checkpoint")
    checkpoint = open_source(where)
    if checkpoint.weights_sha256 != bundle.weights_sha256 or checkpoint.config != bundle.config:
        random = "; where the module has random ones, load its weights from a file, or set a seed"
        hint = random if isinstance(checkpoint, UserCheckpoint) else ""
        raise ArtifactError(f"{bundle.directory} was not exported from the weights in {where}: export it again{hint}")
    ours, theirs = bundle.tokenizer_hashes, checkpoint.tokenizer_hashes
    if other := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        raise OtherTokenizers(f"{bundle.directory} has other tokenizers than {where}, {', '.join(other)}: export again")
    return checkpoint


def open_source(path: Path) -> Checkpoint | UserCheckpoint:
    """Open a checkpoint folder, or run a Python file and call its function. Raises TformerError."""
    return open_user_model(path) if names_function(path) else open_checkpoint(path)


def open_checkpoint(directory: Path, weights: bool = True) -> Checkpoint:
    """Open a checkpoint and verify its hashes, that of the weights only with `weights`. Raises ArtifactError."""
    header = read_header(directory, HEADER, "checkpoint", VERSION)
    if header["version"] > 1 and "sha256" not in header:
        raise ArtifactError(f"{directory / HEADER} is damaged: it has no sha256; make the checkpoint again")
    if missing := {header["weights"], *tokenizer_files(header["tokenizer"])} - set(header["files"]):
        raise ArtifactError(f"{directory / HEADER} is damaged: no hash of {min(missing)}")
    hashes = {name: sha for name, sha in header["files"].items() if weights or name != header["weights"]}
    verify(directory, hashes, "checkpoint")
    try:
        config = from_dict(ModelConfig, header["model"], "model")
    except ConfigError as error:
        raise ArtifactError(f"{directory / HEADER} is damaged: {error}") from None
    return Checkpoint(directory, config, load_tokenizers(directory, header["tokenizer"]), header)
