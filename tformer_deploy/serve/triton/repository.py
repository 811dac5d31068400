"""Writes a bundle into a model repository of Triton, and reads there how it is to run.

`NAME/config.pbtxt` describes the model to Triton; its parameters are `Settings` and `Caps`. `NAME/1/model.py` imports
`model.TritonPythonModel`; `NAME/1/bundle` is a copy of the bundle.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

from ...base.errors import ConfigError, unknown
from ...base.files import atomic_directory
from ...base.settings import check_types, from_dict, parse_settings
from ...bundle.manifest import Bundle
from ...decoding import DecodeOptions
from ...engines import engine_name
from ...translate.opening import TranslatorOptions
from ..models import Caps
from ..protocols.inference import INPUTS, OUTPUTS, PIECE, STREAM

CONFIG, VERSION, COPY = "config.pbtxt", "1", "bundle"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
TYPES = {"BYTES": "TYPE_STRING", "FP64": "TYPE_FP64", "BOOL": "TYPE_BOOL", "INT32": "TYPE_INT32"}
"""Datatypes, as a configuration names them."""
OPTION_TYPES = {int: "TYPE_INT64", float: "TYPE_FP64", bool: "TYPE_BOOL"}
"""Types of options; of all others, text."""
LIMITS = "limits."
"""What the names of parameters that are fields of Caps begin with."""
UNUSED = ("align", "endless")
"""Options that are no inputs: there is no output for alignments, and no request may be endless."""
CODE = '''"""Written by `tformer triton`. The model is in the package tformer-deploy: Triton's Python must have it."""

from tformer_deploy.serve.triton.model import TritonPythonModel  # noqa: F401
'''


@dataclass(frozen=True)
class Settings:
    """How a model runs: parameters of its configuration."""

    bundle: str = COPY
    """Its folder, from the folder of the model's version; or an absolute path."""
    backend: str = "ort"
    variant: str = ""
    """Empty: the bundle's default."""
    device: str = "cpu"
    threads: int = 0
    shortlist: bool = False
    slots: int = 32
    max_queue: int = 1024

    def __post_init__(self) -> None:
        check_types(self)

    def options(self, folder: Path) -> TranslatorOptions:
        """What to open, for a model whose version is in a folder."""
        variant = self.variant or None
        bundle = folder / self.bundle
        return TranslatorOptions(
            bundle, self.backend, variant, self.device, threads=self.threads, shortlist=self.shortlist
        )


def model_folder(repository: Path, name: str) -> Path:
    """The folder of a model, which is its name for clients. Raises ConfigError."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"'{name}' is no name of a model: use --name with letters, digits, '.', '_' and '-'")
    return repository / name


def write_model(bundle: Bundle, model: Path, settings: Settings, caps: Caps, stream: bool, force: bool) -> None:
    """Write a bundle into the folder of a model.

    `stream`: a request may have pieces; else it has one answer. Raises ConfigError for an engine that the bundle is not
    for, and ArtifactError where the folder exists without `force`.
    """
    engine_name(settings.backend, settings.variant or None, bundle, settings.device)
    with atomic_directory(model, force, "model of Triton", lambda path: (path / CONFIG).is_file()) as folder:
        (folder / CONFIG).write_text(config(model.name, settings, caps, stream), "utf-8")
        shutil.copytree(bundle.directory, folder / VERSION / COPY)
        (folder / VERSION / "model.py").write_text(CODE, "utf-8")


def config(name: str, settings: Settings, caps: Caps, stream: bool) -> str:
    """The configuration. It has one instance, because the scheduler batches: more would not share steps."""
    inputs = [_tensor(each, TYPES[kind], "-1") for each, kind in INPUTS.items()]
    inputs.append(_tensor("prefix", TYPES["BYTES"], "-1", optional=True))
    inputs += [
        _tensor(each, OPTION_TYPES.get(kind, "TYPE_STRING"), "1", optional=True)
        for each, kind in get_type_hints(DecodeOptions).items()
        if each not in UNUSED
    ]
    outputs = [_tensor(each, TYPES[kind], "-1") for each, kind in OUTPUTS.items()]
    if stream:
        inputs.append(_tensor(STREAM, "TYPE_BOOL", "1", optional=True))
        outputs.append(_tensor(PIECE, TYPES["BYTES"], "1"))
    parameters = {**_texts(settings), **{LIMITS + key: value for key, value in _texts(caps).items()}}
    lines = [
        "# Written by tformer triton; docs/serve.md describes the inputs, outputs and parameters.",
        f"name: {json.dumps(name)}",
        'backend: "python"',
        "max_batch_size: 0",
        *(f"input {each}" for each in inputs),
        *(f"output {each}" for each in outputs),
        "instance_group { kind: KIND_CPU count: 1 }",
        f"model_transaction_policy {{ decoupled: {str(stream).lower()} }}",
        *(
            f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
            for key, value in parameters.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def read_parameters(parameters: Mapping[str, Mapping[str, str]]) -> tuple[Settings, Caps]:
    """What a configuration's parameters say. Those in capitals are Triton's own. Raises ConfigError."""
    texts = {key: value["string_value"] for key, value in parameters.items() if not key.isupper()}
    known = [*_texts(Settings()), *(LIMITS + each for each in _texts(Caps()))]
    for key in texts:
        if key not in known:
            raise unknown(f"parameter of {CONFIG}", key, known)
    limits = {key.removeprefix(LIMITS): texts.pop(key) for key in known if key.startswith(LIMITS) and key in texts}
    settings = from_dict(Settings, parse_settings(Settings, "parameters", texts), "parameters")
    return settings, from_dict(Caps, parse_settings(Caps, "limits", limits), "limits")


def _texts(values: Settings | Caps) -> dict[str, str]:
    """Fields as texts; for bodies Triton has a limit of its own."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in asdict(values).items()
        if name != "body_bytes"
    }


def _tensor(name: str, datatype: str, dims: str, optional: bool = False) -> str:
    return f"{{ name: {_quoted(name)} data_type: {datatype} dims: [ {dims} ]{' optional: true' if optional else ''} }}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
