"""Origins of constants: what is written is read again, and what nobody wrote is refused."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.bundle.origin import ORIGINS, Origin, concatenated, read_origins, write_origins
from tformer_deploy.export.save import origins_of

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


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 200_000, None])
def test_a_graph_without_origins_is_an_error_of_one_line(text: str | None) -> None:
    model = onnx.ModelProto()
    if text is not None:
        model.metadata_props.add(key=ORIGINS, value=text)
    with pytest.raises(ArtifactError, match="export the bundle again") as caught:
        origins_of(model, Path("encoder.onnx"))
    assert "\n" not in str(caught.value)
