"""RMS norms of ordinary models on a GPU. Without one the kernel runs in triton's interpreter, on a pretended GPU."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from foredraft.kernels.gpu.loading import load_exact_kernels
from foredraft.models.exact_modules import ExactRMSNorm, replace_rms_norms
from foredraft.models.fused_norms import fuse_norms
from tests.support.gpu_cases import DEVICE, TRITON
from tests.support.pretend_kernels import pretend_kernels


class GatedNorm(nn.Module):
    """RMS norm with a gate, as recurrent layers have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight
        return out if gate is None else out * gate


def use_gpu() -> AbstractContextManager[None]:
    return nullcontext() if torch.cuda.is_available() else pretend_kernels()


def make_model(kind: Any = hf.LlamaConfig) -> Any:
    torch.manual_seed(0)
    config = kind(
        vocab_size=61, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight, 1, 0.3)
    return model


@TRITON
@pytest.mark.parametrize("kind", [hf.LlamaConfig, hf.Qwen3Config, hf.Gemma2Config])
def test_logits_stay_within_rounding(kind: Any) -> None:
    ids = [[5, 9, 17, 4, 31]]
    with use_gpu(), torch.no_grad():
        model = make_model(kind).to("cuda:0")
        fused = fuse_norms(model, is_owned=False)
        names = [name for name, module in fused.named_modules() if isinstance(module, ExactRMSNorm)]
        assert names == [name for name, module in model.named_modules() if "RMSNorm" in type(module).__name__]
        assert not any(isinstance(module, ExactRMSNorm) for module in model.modules()), "the caller's model changed"
        logits = [each(torch.tensor(ids, device="cuda:0")).logits.cpu() for each in (model, fused)]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=2e-6)


@TRITON
def test_a_norm_with_further_arguments_stays() -> None:
    parts = nn.ModuleDict({"gated": GatedNorm(32), "plain": nn.Linear(32, 32)}).to(DEVICE)
    replace_rms_norms(parts, load_exact_kernels())
    assert isinstance(parts["gated"], GatedNorm)
    assert isinstance(parts["plain"], nn.Linear)


def test_without_kernels_the_model_stays() -> None:
    model = make_model()
    assert fuse_norms(model, is_owned=True) is model
    assert not any(isinstance(module, ExactRMSNorm) for module in model.modules())


@TRITON
def test_a_norm_in_training_has_the_gradient_of_the_original() -> None:
    model = make_model().to(DEVICE)
    original, x = model.model.norm, torch.randn(3, 64, device=DEVICE)
    expected = torch.autograd.grad(original(x).square().sum(), original.weight)[0]
    replace_rms_norms(model, load_exact_kernels())
    assert isinstance(model.model.norm, ExactRMSNorm)
    found = torch.autograd.grad(model.model.norm(x).square().sum(), model.model.norm.weight)[0]
    torch.testing.assert_close(found, expected)
