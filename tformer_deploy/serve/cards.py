"""What a server says of each of its models: the bundle, its hash, the engine, the check's result, what may be asked."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError
from ..base.headers import read_json, schema_error
from ..bundle.manifest import REPORT, Bundle, open_bundle
from ..engines import engine_name
from ..engines.base import Continues, Engine, own_batches
from ..translate.opening import TranslatorOptions
from .models import Model


def card(model: Model) -> dict[str, Any]:
    """A model as JSON. Raises ArtifactError for a check.json that is damaged."""
    translator = model.translator
    return {
        "name": model.name,
        **_bundle(model),
        "precision": translator.engine.precision,
        "steps": _steps(translator.engine),
        "attention": translator.engine.attention,
        "source_tokens": translator.engine.limits.src_tokens,
        "limits": asdict(model.caps),
    }


def _steps(engine: Engine) -> str:
    """What takes the steps that texts share."""
    if own_batches(engine):
        return "C++"
    return f"Python: {engine.no_continuous}" if isinstance(engine, Continues) else "Python"


def _bundle(model: Model) -> dict[str, Any]:
    """What a bundle's own files say of it."""
    options = model.translator.settings
    if not isinstance(options, TranslatorOptions):
        return {"engine": type(model.translator.engine).__name__}
    bundle = options.bundle if isinstance(options.bundle, Bundle) else open_bundle(Path(options.bundle), graphs=False)
    engine = engine_name(options.backend, options.variant, bundle, options.device)
    folder = bundle.directory
    found: dict[str, Any] = {"bundle": folder.resolve().name, "sha256": model.version, "engine": engine}
    if (folder / REPORT).exists():
        report = read_json(folder, REPORT)
        if wrong := schema_error(report, "check"):
            raise ArtifactError(f"{folder / REPORT} is damaged: {wrong}; export the bundle again")
        found["check"] = {"passed": report["passed"], "sentences": report["sentences"], "equal": {}}
        for each in report.get("engines", []):
            if each["engine"] == engine:
                found["check"]["equal"] = {output["mode"]: output["equal"] for output in each["outputs"]}
    return found
