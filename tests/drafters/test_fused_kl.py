"""The fused KL divergence against the one that is written out."""

import pytest
import torch

from foredraft.drafters.fused_kl import CACHED_ROWS, FusedKL
from foredraft.drafters.losses import TargetLogProbs, compute_draft_loss, kl

V = 11


@pytest.mark.parametrize("shape", [(3,), (2 * CACHED_ROWS + 5,), (2, CACHED_ROWS + 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, V, generator=generator).to(dtype)
    log_p = torch.randn(*shape, 2, V, generator=generator).log_softmax(-1)[..., 0, :]  # rows that are not adjacent
    log_p[..., 0, :2] = -torch.inf  # tokens that the target excludes
    weights = torch.rand(shape, generator=generator)
    outcomes = []
    for compute in (FusedKL.apply, lambda q, p: kl(p, q.float().log_softmax(-1))):
        leaf = logits.clone().requires_grad_()
        values = compute(leaf, log_p)
        (values * weights).sum().backward()
        outcomes.append((values.detach(), leaf.grad))
    (values, gradient), (wanted, wanted_gradient) = outcomes
    assert torch.allclose(values, wanted, atol=1e-6)
    assert gradient.dtype == dtype
    assert torch.allclose(gradient, wanted_gradient, atol=1e-6 if dtype == torch.float32 else 1e-2)


def test_a_target_that_learns_too_gets_its_gradient() -> None:
    log_p = torch.randn(4, V).log_softmax(-1).requires_grad_()
    tokens = torch.zeros(4, dtype=torch.int64)
    compute_draft_loss("kl", torch.randn(4, V), TargetLogProbs(log_p), tokens).sum().backward()
    assert log_p.grad is not None
