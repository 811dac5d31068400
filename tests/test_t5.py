"""Models of the T5 family against transformers, on small random weights."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers loads: random weights, nothing is fetched

import pytest
import torch
from transformers.activations import ACT2FN

from tformer_deploy.model import ACTIVATIONS


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("gelu_tanh", "gelu_new"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu_sigmoid", "quick_gelu"), ("silu", "silu")],
)
def test_activations_equal_transformers(ours: str, theirs: str) -> None:
    x = torch.linspace(-9, 9, 500, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[ours](x), ACT2FN[theirs](x), atol=1e-12, rtol=1e-12)
