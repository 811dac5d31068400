"""The kernels of the native engine: every instruction set that this machine has, and weights as Python packs them."""

from __future__ import annotations

import subprocess
from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_deploy.export.packing import column_sums, pack_bf16, pack_fp32, pack_int4, pack_int8, pack_vector
from tformer_deploy.export.quantizing import Array, channels, groups

from .cpp_programs import program

seeds = st.integers(0, 2**32 - 1)


def run(*words: object, given: bytes = b"") -> bytes:
    """What the program of engines/tests/kernels.cpp prints."""
    command = [str(program("kernels")), *map(str, words)]
    done = subprocess.run(command, input=given, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout.decode()[-500:] + done.stderr.decode()[-500:]
    return done.stdout


def sets() -> dict[str, str]:
    """What is said of every name."""
    lines = run("sets").decode().splitlines()
    return dict(line.split("\t") for line in lines)  # type: ignore[misc]


@cache
def count_of_sets() -> int:
    """Those that this machine has."""
    return [*sets().values()].count("here")


def test_sets_are_equal_to_plain_cpp() -> None:
    """Products, norms, attention, output: to the last bit, over random shapes; plain C++ is near doubles."""
    said = run(1, 100).decode()
    assert said == f"15 checks of {count_of_sets()} sets, 100 times\n"


@settings(max_examples=10)
@given(seed=seeds)
def test_other_shapes(seed: int) -> None:
    run(seed, 5)


def test_a_set_by_its_name() -> None:
    found = sets()
    assert found["portable"] == "here"
    assert found[found["best"]] == "here"
    assert found["unknown"].startswith("there are no kernels 'mmx', only ")
    for name, text in found.items():
        assert name in ("best", "unknown") or text == "here" or text.startswith(f"kernels '{name}' need ")


def products(kind: str, x: Array, outputs: int, arrays: list[Array], group: int = 0) -> list[Array]:
    """x times packed weights, by every set."""
    given = b"".join(array.tobytes() for array in [*arrays, x])
    found = np.frombuffer(run("product", kind, *x.shape, outputs, group, given=given), np.float32)
    made = list(found.reshape(-1, x.shape[0], outputs))
    assert len(made) == count_of_sets()
    return made


def random(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


shapes = {"rows": st.integers(1, 20), "inputs": st.integers(1, 200), "outputs": st.integers(1, 70), "seed": seeds}


@settings(max_examples=10)
@given(**shapes)
def test_packed_floats(rows: int, inputs: int, outputs: int, seed: int) -> None:
    weight, x = random(seed, outputs, inputs), random(seed + 1, rows, inputs)
    bits = pack_bf16(weight)
    near = weight.view(np.uint32) & 0xFFFF0000
    for found in products("fp32", x, outputs, [pack_fp32(weight)]):
        np.testing.assert_allclose(found, x.astype(np.float64) @ weight.T, atol=1e-4)
    for found in products("bf16", x, outputs, [bits]):
        assert (np.abs(found - x @ weight.T) <= np.abs(x) @ np.abs(weight.T) * 2**-8 + 1e-4).all()
    unpacked = bits.transpose(0, 2, 1, 3).reshape(len(bits) * 16, -1)[:outputs, :inputs]
    apart = np.abs(unpacked.astype(np.int64) - (near >> 16))
    assert apart.max() <= 1
    exact = (unpacked.astype(np.uint32) << 16).view(np.float32)
    assert (np.abs(exact - weight) <= np.abs(weight) * 2**-8).all()


@settings(max_examples=10)
@given(**shapes)
def test_packed_int8(rows: int, inputs: int, outputs: int, seed: int) -> None:
    integers, scales = channels(random(seed, outputs, inputs))
    x = np.random.default_rng(seed).integers(-3, 253, (rows, inputs)).astype(np.float32)
    arrays = [pack_int8(integers), pack_vector(scales), column_sums(integers)]
    expected = (x.astype(np.int64) @ integers.T.astype(np.int64)).astype(np.float32) * scales
    for found in products("int8", x, outputs, arrays):
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=10)
@given(**shapes, group=st.sampled_from([16, 32, 64, 128, 256]))
def test_packed_int4(rows: int, inputs: int, outputs: int, seed: int, group: int) -> None:
    integers, scales = groups(random(seed, outputs, inputs), 4, group)
    x = random(seed + 1, rows, inputs)
    wide = ((integers.astype(np.float32) - 8) * scales[..., None]).reshape(outputs, -1)[:, :inputs]
    for found in products("int4", x, outputs, [pack_int4(integers), pack_fp32(scales)], group):
        largest = np.abs(x).max() / 127 / 2 * np.abs(wide).sum(1)  # inputs are rounded
        assert (np.abs(found - x @ wide.T) <= largest + 1e-3).all()


def test_bf16_is_rounded_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0x7FC00001, 0x7F800001], np.uint32)
    packed = pack_bf16(bits.view(np.float32)[:, None])[0, 0, :6, 0]
    assert packed.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0x7FC0]


def test_panels_are_padded_with_zeros() -> None:
    weight = np.ones((17, 3), np.int8)
    packed = pack_int8(weight)
    assert packed.shape == (2, 16, 16, 4)
    assert packed.sum() == weight.sum()
    assert column_sums(weight).tolist() == [3] * 17 + [0] * 15
