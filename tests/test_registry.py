"""The registry of engines: what each line must have, and that nothing else asks for an engine by its name."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.bundle.manifest import Bundle, open_bundle
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.engines import BACKENDS, ENGINES, EngineName, check_name, engine_names, expand, limits_of, recipe_of
from tformer_deploy.engines.spec import EngineSpec

PACKAGE = Path(__file__).parent.parent / "tformer_deploy"
RUNTIME = {"native": "tformer_native", "openvino": "openvino", "eager": "torch", "ort": "onnxruntime"}
"""What must be there to import the module of an engine."""


@pytest.mark.parametrize("spec", ENGINES, ids=BACKENDS)
def test_every_engine_has_what_its_line_promises(spec: EngineSpec) -> None:
    if (runtime := RUNTIME.get(spec.name)) and not find_spec(runtime):
        pytest.skip(f"{runtime} is not installed")
    module = import_module(f"tformer_deploy.engines.{spec.name}")
    assert module.open_engine and module.load_runtime and hasattr(module, "open_encoder") == (not spec.no_encoder)


def test_every_name_of_a_bundle_is_an_engine_of_it(variants_bundle: Path) -> None:
    bundle = open_bundle(variants_bundle)
    for text in engine_names(bundle):
        name = EngineName(text)
        assert name == text and EngineName(name) is name and name.device in name.spec.devices
        check_name(name, bundle)
        recipe, folder = recipe_of(name, bundle), name.folder(bundle)
        assert recipe is (bundle.variants[folder] if folder else bundle.recipe)
        assert name.spec.reference or recipe.target in name.spec.targets
        assert limits_of(name, bundle).batch >= recipe.axes.batch.max
    for wrong in ("ort:int88", "cpp@cuda", "openvino:int8", "eager:int8", "nothing"):
        with pytest.raises(ConfigError, match=f"unknown backend '{wrong}'"):
            check_name(wrong, bundle)


def test_a_variant_beside_a_backend_without_variants_names_those_that_have_it(
    variants_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(variants_bundle)
    recipes = {"native-int8": load_recipe("native-int8"), "trt": load_recipe("trt")}
    bundle.variants.update({name: recipe.for_model(bundle.config) for name, recipe in recipes.items()})
    monkeypatch.setattr(Bundle, "require_kinds", lambda *_: None)
    for backend, variant, remedy in (
        ("trt", "fp16", "use --backend trt:fp16"),
        ("eager", "native-int8", "add --backend native"),
        ("eager", "int8", "add --backend ort or cpp"),
        ("eager", "fp16", "add --backend trt:fp16"),
    ):
        with pytest.raises(ConfigError, match=f"^--variant {variant}: --backend {backend} has no .*: {remedy}$"):
            expand([backend], [variant], bundle)
    with pytest.raises(ConfigError, match="unknown variant 'int88': did you mean 'int8'"):
        expand(["eager"], ["int88"], bundle)


def asks_for_an_engine(node: ast.AST) -> bool:
    """Whether it compares what is called a backend or an engine with a name in quotes."""
    if not isinstance(node, ast.Compare):
        return False
    sides = (node.left, *node.comparators)
    called = {getattr(side, "attr", getattr(side, "id", "")) for side in sides}
    texts = [part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)]
    return any(text in BACKENDS for text in texts) and bool(called & {"backend", "engine", "name"})


def test_nobody_else_asks_for_an_engine_by_its_name() -> None:
    assert asks_for_an_engine(ast.parse("name.backend in ('ort', 'native')", mode="eval").body)
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if asks_for_an_engine(node)
    ]
    assert not found, f"ask its EngineSpec instead: {found}"
