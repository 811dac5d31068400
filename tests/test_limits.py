"""Half precision without a GPU, as `benchmarks/limits.py` computes it: half tensors are rounded when written."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.limits import rounded
from tformer_deploy.engines.ort.library import InferenceSession, session_options
from tformer_deploy.export.half import Half, to_half

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_every_half_tensor_is_rounded_and_no_other(half: Half) -> None:
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(0, 1, (4, 4)).astype(np.float32) for _ in range(2))
    nodes = [
        helper.make_node("MatMul", ["past_k_0", "weight"], ["product"]),
        helper.make_node("Add", ["product", "product"], ["twice"]),
        helper.make_node("Softmax", ["twice"], ["shares"]),
        helper.make_node("Identity", ["twice"], ["present_k_0"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in ("past_k_0", "present_k_0")]
    shares = helper.make_tensor_value_info("shares", TensorProto.FLOAT, [4, 4])
    constants = [numpy_helper.from_array(weight, "weight")]
    graph = helper.make_graph(nodes, "step", values[:1], [values[1], shares], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    to_half(model, half, {})
    made = rounded(model, half)
    onnx.checker.check_model(made, full_check=True)
    assert {value.type.tensor_type.elem_type for value in (*made.graph.input, *made.graph.output)} == {
        TensorProto.FLOAT
    }
    session = InferenceSession(made.SerializeToString(), session_options(1), providers=["CPUExecutionProvider"])
    kept = x.astype(DTYPES[half]).astype(np.float32)
    present, found = session.run(["present_k_0", "shares"], {"past_k_0": kept})

    def cut(array: np.ndarray) -> np.ndarray:
        return array.astype(DTYPES[half]).astype(np.float32)

    product = cut(kept @ cut(weight))
    twice = cut(product + product)
    assert np.array_equal(present, twice)
    exact = np.exp(twice - twice.max(-1, keepdims=True))
    assert np.abs(found - exact / exact.sum(-1, keepdims=True)).max() < 1e-6, "softmax is fp32"
