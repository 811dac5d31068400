"""What the files of a release contain, as CycloneDX: sbom.py FOLDER writes FOLDER/sbom.cdx.json.

C++ libraries have the versions that get-dependencies noted, packages of Python those of constraints.txt or of this
Python.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parent.parent
INSIDE = {
    "sentencepiece": ("absl", "darts_clone", "esaxx", "protobuf-lite"),
    "nanobind": ("robin_map",),
    "ziglang": ("libcxx", "libcxxabi", "libunwind"),
}
"""Other projects' code that is a part of a package, without a version of its own."""
NATIVE = ("json", "onnxruntime", "openssl", "pcre2")
"""Names in get-dependencies' folder `versions` of what is in tformer-native; of ONNX Runtime these are headers."""


def noted(processor: str, names: Iterable[str]) -> Iterator[PackageURL]:
    """What get-dependencies has noted for that processor."""
    for name in names:
        file = ROOT / ".cache" / f"cpp-{processor}-manylinux" / "versions" / name
        yield PackageURL.from_string(file.read_text(encoding="utf-8").strip())


def from_pip(name: str, number: str) -> PackageURL:
    """The package URL of a package of PyPI."""
    return PackageURL("pypi", name=name.lower().replace("_", "-"), version=number)


def constrained(name: str) -> PackageURL:
    """With the version that constraints.txt has."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    number = re.search(rf"(?mi)^{re.escape(name).replace('-', '[-_]')}==(\S+)", text)
    return from_pip(name, number[1] if number else "")


def parts(file: str) -> list[PackageURL]:
    """What is inside one file of the release."""
    found = re.search(r"(x86_64|aarch64)", file)
    if not found:
        return []
    native = file.startswith("tformer_native")
    inside = [
        *noted(found[0], NATIVE if native else (*NATIVE, "sentencepiece")),
        from_pip("ziglang", version("ziglang")),
    ]
    inside.append(from_pip("nanobind", version("nanobind")) if native else constrained("onnxruntime"))
    for each in list(inside):
        inside += [each._replace(subpath=part) for part in INSIDE.get(each.name, ())]
    return inside


def needed(file: str) -> list[PackageURL]:
    """What a package of Python needs beside it, in the versions that it was tested with."""
    if not file.endswith((".whl", ".tar.gz")) or file.startswith("tformer-cpp"):
        return []
    folder = ROOT / "engines" / "python" if file.startswith("tformer_native") else ROOT
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [constrained(re.split(r"[^\w-]", each)[0]) for each in project["dependencies"]]


def component(url: PackageURL, scope: ComponentScope) -> Component:
    """One library."""
    name = f"{url.name}/{url.subpath}" if url.subpath else url.name
    return Component(
        name=name, version=url.version, purl=url, bom_ref=url.to_string(), type=ComponentType.LIBRARY, scope=scope
    )


def sbom(folder: Path) -> Bom:
    """Of all files that lie in the folder."""
    number = re.search(r'__version__ = "(.*)"', (ROOT / "tformer_deploy" / "__init__.py").read_text(encoding="utf-8"))
    assert number
    bom, known = Bom(), {}
    root = Component(name="tformer-deploy", version=number[1], bom_ref="tformer-deploy", type=ComponentType.APPLICATION)
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    digests = []
    for path in sorted(folder.iterdir()):
        digests.append(hashlib.sha256(path.read_bytes()).hexdigest())
        hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digests[-1])]
        file = Component(name=path.name, version=number[1], bom_ref=path.name, type=ComponentType.FILE, hashes=hashes)
        inside = {url.to_string(): component(url, ComponentScope.REQUIRED) for url in parts(path.name)}
        beside = {url.to_string(): component(url, ComponentScope.EXCLUDED) for url in needed(path.name)}
        known.update({**beside, **known, **inside})
        bom.components.add(file)
        bom.register_dependency(file, [known[each] for each in {**beside, **inside}])
        bom.register_dependency(root, [file])
    bom.components.update(known.values())
    bom.serial_number = uuid5(NAMESPACE_URL, " ".join(digests))
    return bom


def main(folder: Path) -> None:
    """Writes the file, which is checked against CycloneDX's own schema."""
    text = JsonV1Dot6(sbom(folder)).output_as_string(indent=2) + "\n"
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"sbom: {problem}")
    (folder / "sbom.cdx.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
