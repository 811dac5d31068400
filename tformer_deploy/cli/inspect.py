"""tformer inspect"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import ArtifactError
from ..base.notes import printable
from .options import Json
from .root import app, emit


@app.command(epilog="Example: tformer inspect bundles/numbers")
def inspect(
    path: Annotated[Path, typer.Argument(help="Bundle or run folder.")],
    json: Json = False,
) -> None:
    """Verify every hash of a bundle or run folder, and describe it."""
    from ..base.headers import read_json, schema_error
    from ..bundle.manifest import MANIFEST, REPORT, open_bundle
    from ..bundle.plans import all_plans

    if (path / MANIFEST).is_file():
        bundle = open_bundle(path)
        header = {**bundle.manifest, "model": asdict(bundle.config), "recipe": asdict(bundle.recipe)}
        recipes = bundle.variants.items()
        variants = {name: {**header["variants"][name], "recipe": asdict(recipe)} for name, recipe in recipes}
        plans = [each for variant in bundle.variants for each in all_plans(bundle, variant)]
        stamps = [{"stamp": str(each.stamp), "profiles": [str(p) for p in each.profiles]} for each in plans]
        header |= {"variants": variants, "plans": stamps}
        if (path / REPORT).exists():
            header["check"] = read_json(path, REPORT)
            if wrong := schema_error(header["check"], "check"):
                raise ArtifactError(f"{path / REPORT} is damaged: {wrong}; export the bundle again")
    else:
        from ..model.checkpoint import open_checkpoint
        from ..train.runs import verify_state

        checkpoint = open_checkpoint(path)
        header = {**checkpoint.header, "model": asdict(checkpoint.config)}
        header["files"] = {**header["files"], **verify_state(path)}
    header["sizes"] = {name: (path / name).stat().st_size for name in header["files"]}
    emit(header, json, listing(path, header))


def listing(path: Path, header: dict[str, Any]) -> str:
    """The description as text."""
    from ..bundle.contract import MEMORY_GRAPH
    from ..engines import STANDARD

    model = header["model"]
    lines = [
        f"{path}: {header['format']} {header['version']}, every hash verified",
        f"  model      an encoder of {model['module_parameters']:,} parameters, vectors of {model['encoder_d_model']}, "
        f"vocabulary {model['src_vocab']}, {model['max_positions']} positions"
        if not model["decoder_layers"]
        else f"  model      a module of {model['module_parameters']:,} parameters, {model['decoder_layers']} caches of "
        f"{model['d_model']}, vocabulary {model['src_vocab']}/{model['tgt_vocab']}, {model['max_positions']} positions"
        if model["module_parameters"]
        else f"  model      {model['encoder_layers']}+{model['decoder_layers']} layers, d {model['d_model']}, "
        f"ff {model['d_ff']}, {model['heads']} heads, vocabulary {model['src_vocab']}/{model['tgt_vocab']}, "
        f"{model['max_positions']} positions, {model['norm_position']}-norm",
    ]
    if "recipe" in header:
        recipe = header["recipe"]
        axes = ", ".join(f"{name} {axis['min']}..{axis['max']}" for name, axis in recipe["axes"].items())
        lines += [
            f"  recipe     {recipe['precision']}, {recipe['cache']} cache, opset {recipe['opset']}",
            f"  axes       {axes}",
            f"  made with  {', '.join(f'{name} {version}' for name, version in header['versions'].items())}",
        ]
    for name, variant in header.get("variants", {}).items():
        recipe, default = variant["recipe"], " (default)" if name == header.get("default") else ""
        caches = "" if recipe["cache_precision"] == "fp32" else f", caches in {recipe['cache_precision']}"
        lines.append(f"  variant    {name}{default}: {recipe['precision']} for {recipe['target']}{caches}")
        for graph, made in variant["graphs"].items():
            if made.get("passes"):
                lines.append(f"             {graph}: {', '.join(made['passes'])}")
        if variant.get("fp32"):
            lines.append(f"             in fp32: {', '.join(variant['fp32'])}")
    parts = {STANDARD: header, **header.get("variants", {})}
    if encoders := [name for name, part in parts.items() if MEMORY_GRAPH in part.get("graphs", {})]:
        lines.append(f"  encode     {', '.join(encoders)}")
    if "shortlist" in header:
        lists = header["shortlist"]
        found = (
            f"{lists['tokens']:.2%} of its text's tokens, lists of {lists['size']:.0f}"
            if lists["sentences"]
            else "from Marian, not measured"
        )
        lines.append(f"  shortlist  best {lists['best']}, frequent {lists['frequent']}: {found}")
    lines += [f"  plans      {each['stamp']}: {', '.join(each['profiles'])}" for each in header.get("plans", [])]
    if "check" in header:
        found = header["check"]
        lines.append(f"  check      {'passed' if found['passed'] else 'failed'}, {found['sentences']} sentences")
        for engine in found.get("engines", []):
            equal = ", ".join(f"{each['mode']} {each['equal']} equal" for each in engine["outputs"])
            scores = f"{equal}, scores within {engine['scores_max']:.1e}"
            memory = engine.get("memory")
            lines.append(
                f"             {engine['engine']}: "
                + (f"vectors within {memory['largest']:.1e}" if memory and not equal else scores)
            )
    lines += [f"  {size / 1e6:9.2f} MB  {name}" for name, size in header["sizes"].items()]
    return "\n".join(map(printable, lines))
