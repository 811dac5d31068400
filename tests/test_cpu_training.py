"""What training on a CPU computes itself: values and gradients are those of PyTorch's own operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tformer_deploy.model import cpu_training
from tformer_deploy.train import projected
from tformer_deploy.train.bf16 import bf16_matmuls, linear
from tformer_deploy.train.losses import summed_loss


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("keys", [7, 20])
@pytest.mark.parametrize("masked", [True, False])
def test_attention(keys: int, masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = numbers(2, 3, 5 if masked else keys, 4), numbers(2, 3, keys, 4), numbers(2, 3, keys, 4)
    allowed = torch.arange(keys) < torch.tensor([[keys], [4]])
    mask = allowed[:, None, None].expand(-1, 1, q.shape[2], -1) if masked else None
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked)
    torch.testing.assert_close(cpu_training.attend(q, k, v, mask, 0.0), expected)

    def dropped(*inputs: Tensor) -> Tensor:
        torch.manual_seed(1)
        return cpu_training.attend(*inputs, mask, 0.3)

    assert torch.autograd.gradcheck(dropped, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("dropout", [0.1, 0.25, 1.0])
def test_dropout_keeps_as_many_and_the_mean(dropout: float) -> None:
    torch.manual_seed(0)
    factors = cpu_training.kept(torch.empty(999, 1001), dropout)
    assert (factors == 0).float().mean().item() == pytest.approx(dropout, abs=2e-3)
    assert factors.mean().item() == pytest.approx(float(dropout < 1), abs=3e-3)
    assert len(factors.unique()) == (2 if dropout < 1 else 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rdrop", [0.0, 3.0])
def test_the_loss_of_some_positions_at_a_time(rdrop: float, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "ROWS", 6)
    torch.manual_seed(0)
    hidden, output = numbers(4, 5, 6), nn.Linear(6, 11, bias).double()
    targets = torch.randint(1, 11, (2, 5)).repeat(2, 1)
    targets[0::2, 3:] = 0
    inputs = (hidden, *output.parameters())
    found = projected.projected_loss(hidden, output, targets, 0, 0.1, rdrop)
    expected = summed_loss(output(hidden), targets, 0, 0.1, rdrop)
    torch.testing.assert_close(found, expected)
    with torch.inference_mode():
        torch.testing.assert_close(projected.projected_loss(hidden, output, targets, 0, 0.1, rdrop), expected)
    for own, theirs in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(own, theirs)


def test_bf16_rounds_what_linear_layers_multiply() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 16), torch.randn(4, 8, 32, requires_grad=True)
    inputs = (x, *layer.parameters())
    with bf16_matmuls(torch.device("cpu"), True):
        found = layer(x)
    assert found.dtype == torch.float32 and not torch.equal(found, layer(x))
    torch.testing.assert_close(found, layer(x), atol=0.03, rtol=0.02)
    exact, rounded = (torch.autograd.grad(y.square().sum(), inputs) for y in (layer(x), found))
    for one, other in zip(exact, rounded, strict=True):
        torch.testing.assert_close(one, other, atol=0.03 * one.abs().max().item(), rtol=0.02)


@pytest.mark.parametrize("transposed", [False, True])
def test_bf16_factors_of_any_sizes(transposed: bool) -> None:
    """What is added to them changes nothing."""
    torch.manual_seed(0)
    x, weight = torch.randn(130, 70), torch.randn(3, 70)
    x = x.t().contiguous().t() if transposed else x
    found = linear(x, weight)
    assert found.shape == (130, 3)
    torch.testing.assert_close(
        found, (x.bfloat16().float() @ weight.bfloat16().float().t()).bfloat16().float(), rtol=0.01, atol=0.05
    )
