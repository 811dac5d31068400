"""Origins of constants: what is written is read again, and what nobody wrote is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import onnx
import pytest

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.bundle.origin import ORIGINS, Origin, concatenated, read_origins, write_origins
from tformer_deploy.check.origins import Checkpoint
from tformer_deploy.export.save import origins_of

from .conftest import small_config

QUERY, KEY = Origin(("query.weight",)).scaled(0.25), Origin(("key.weight",))
BOTH = concatenated([QUERY, KEY])
EVERY = {
    "key.weight": KEY,
    "key.weight.int4.groups": Origin(("key.weight",), form="int4", groups=True),
    "query.weight,key.weight.scaled": BOTH,
    "query.weight,key.weight.scaled.4-12": BOTH.part(4, 12),
    "key.weight.int8.transposed": Origin(("key.weight",), form="int8", transposed=True),
}


def test_what_is_written_is_read() -> None:
    assert read_origins(write_origins(EVERY)) == EVERY
    assert {origin.name: origin for origin in EVERY.values()} == EVERY
    assert BOTH.factors == (0.25, 1.0) and concatenated([KEY, KEY]).factors == ()
    assert BOTH.part(4, 12).part(1, 3).rows == (5, 7)


@pytest.mark.parametrize(
    "described",
    [
        *({}, [], "key.weight", {"tensors": []}, {"tensors": "key"[:0]}, {"tensors": [1]}),
        *({"tensors": ["a"], **wrong} for wrong in ({"factors": ["1"]}, {"factors": [1, 2]}, {"form": "int2"})),
        *({"tensors": ["a"], **wrong} for wrong in ({"rows": [1]}, {"rows": [-1, 2]}, {"rows": [5, 2]})),
        *({"tensors": ["a"], **wrong} for wrong in ({"groups": 1}, {"other": 1})),
    ],
)
def test_what_is_no_origin_is_refused(described: object) -> None:
    with pytest.raises(ValueError, match="is no origin of a constant"):
        read_origins(json.dumps({"name": described}))


def test_each_factor_is_of_tensors_of_its_kind() -> None:
    config = small_config(norm="annotated")
    side = config.encoder
    root, query, gain = math.sqrt(side.width), 1 / math.sqrt(side.head_dim), math.sqrt(1 - 1 / side.width)
    tensors = {"table": np.ones((3, side.width), np.float32), "vector": np.ones(side.width, np.float32)}

    def possible(name: str, factor: float) -> bool:
        made = Checkpoint(tensors, config, {}).made(Origin((name,), (factor,)))
        return made is not None and bool(np.isfinite(made.array).all())

    assert [possible("table", factor) for factor in (1.0, root, query, gain, 2.0)] == [True, True, True, False, False]
    assert [possible("vector", factor) for factor in (1.0, root, query, gain, 2.0)] == [True, False, True, True, False]


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 200_000, None])
def test_a_graph_without_origins_is_an_error_of_one_line(text: str | None) -> None:
    model = onnx.ModelProto()
    if text is not None:
        model.metadata_props.add(key=ORIGINS, value=text)
    with pytest.raises(ArtifactError, match="export the bundle again") as caught:
        origins_of(model, Path("encoder.onnx"))
    assert "\n" not in str(caught.value)
