"""A Python for ARM64 in a folder, of Debian's packages, which qemu-user runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

LIBRARIES = ("libc6", "libgcc-s1", "libstdc++6", "libexpat1", "zlib1g", "libffi8", "libbz2-1.0", "liblzma5")
SUITES = {"3.11": ("bookworm", ("libssl3",)), "3.13": ("trixie", ("libssl3t64", "libzstd1"))}
"""Debian's release of each version of Python, and how it calls libraries that not all releases have."""


class NoPackagesError(Exception):
    """Why there is no such Python."""


def said(command: list[str], folder: Path) -> str:
    """Raises NoPackagesError."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoPackagesError(f"{command[0]}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return done.stdout


def mirror() -> str:
    """Where this machine's own Debian comes from. Raises NoPackagesError."""
    wanted = ["--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian"]  # security updates have another label
    places = said(["apt-get", "indextargets", *wanted], Path("/")).splitlines()
    if not places:
        raise NoPackagesError("apt has no sources of Debian")
    return places[0]


def arm64_python(version: str, folder: Path) -> list[str]:
    """The command that runs it, unpacked into `folder`. Raises NoPackagesError."""
    suite, more = SUITES[version]
    for part in ("lists/partial", "cache/archives/partial", "root"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "sources.list").write_text(f"deb [signed-by={keys} arch=arm64] {mirror()} {suite} main\n")
    places = {"Dir::Etc::sourcelist": folder / "sources.list", "Dir::Etc::sourceparts": "-"}
    places |= {"Dir::State::lists": folder / "lists", "Dir::Cache": folder / "cache", "APT::Sandbox::User": ""}
    places |= {"APT::Architecture": "arm64", "APT::Architectures": "arm64"}
    apt = ["apt-get", "-qq", *(word for name, value in places.items() for word in ("-o", f"{name}={value}"))]
    said([*apt, "update"], folder)
    own = [f"python{version}-minimal", f"libpython{version}-minimal", f"libpython{version}-stdlib"]
    said([*apt, "download", *own, *LIBRARIES, *more], folder)
    for package in folder.glob("*.deb"):
        said(["dpkg", "-x", str(package), "root"], folder)
    if not (folder / "root" / "lib" / "ld-linux-aarch64.so.1").exists():  # since Debian 13 all lies in /usr
        (folder / "root" / "lib").symlink_to("usr/lib")
    return [
        "qemu-aarch64",
        "-cpu",
        "max",
        "-L",
        str(folder / "root"),
        str(folder / "root/usr/bin" / f"python{version}"),
    ]
