"""Random weights that the host makes from a seed, the same bytes everywhere, so that the kit need not carry them.

Needs only numpy.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

DEVIATION, CHUNK = 0.02, 1 << 22
SCALE = np.float32(2 * DEVIATION * 3**0.5)
"""Width of the uniform distribution with that deviation. A normal one would depend on the C library's logarithm."""
LISTED = "seeded.json"
"""In a bundle: file -> its size, seed and hash."""


def fill(path: Path, size: int, seed: int) -> str:
    """Write `size` bytes of random fp32 numbers; returns their SHA-256."""
    if size % 4:
        raise ValueError(f"{path}: {size} bytes are no fp32 numbers")
    generator, digest = np.random.Generator(np.random.PCG64(seed)), hashlib.sha256()
    with path.open("wb") as file:
        for start in range(0, size // 4, CHUNK):
            values = generator.random(min(CHUNK, size // 4 - start), np.float32)
            data = ((values - np.float32(0.5)) * SCALE).astype("<f4").tobytes()
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


def restore(bundle: Path) -> list[str]:
    """Make the listed files that a bundle does not have; returns their names. Raises ValueError for other bytes."""
    listed = json.loads((bundle / LISTED).read_text()) if (bundle / LISTED).exists() else {}
    made = []
    for name, about in listed.items():
        path, temporary = bundle / name, bundle / f"{name}.part"
        if path.exists():
            continue
        found = fill(temporary, about["size"], about["seed"])
        if found != about["sha256"]:
            temporary.unlink()
            raise ValueError(f"{path}: numpy {np.__version__} makes other bytes of seed {about['seed']}: use the kit's")
        temporary.replace(path)
        made.append(name)
    return made


def main() -> None:
    """`seeded.py BUNDLE`: make what is missing in it."""
    try:
        for name in restore(Path(sys.argv[1])):
            print(f"{name} made")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
