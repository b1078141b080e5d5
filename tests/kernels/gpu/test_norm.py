"""Norm of rows: as the models compute it, and the same bits whatever rows are beside it."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from foredraft.errors import ForedraftError
from tests.support.gpu_cases import DEVICE, TRITON

pytestmark = TRITON


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("module", [LlamaRMSNorm, Gemma2RMSNorm], ids=["llama", "gemma"])
@pytest.mark.parametrize("width", [64, 100])
def test_equal_to_the_norm_of_transformers(dtype: torch.dtype, module: type, width: int) -> None:
    from foredraft.kernels.gpu.norm import normalize

    noise = torch.Generator().manual_seed(width)
    x, residual = (torch.randn(5, width, generator=noise).to(DEVICE, dtype) for _ in range(2))
    theirs = module(width, 1e-5).to(DEVICE, dtype)
    theirs.weight.data.normal_(generator=None if DEVICE == "cuda" else noise)
    is_offset = module is Gemma2RMSNorm
    for added in (None, residual):
        out, total = normalize(x, theirs.weight.detach(), 1e-5, added, is_offset)
        expected = x if added is None else x + added
        # the interpreter cuts the bits that bfloat16 lacks, where a GPU rounds
        is_cut = DEVICE == "cpu" and dtype == torch.bfloat16
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(total, expected, rtol=eps if is_cut else 0, atol=0)
        # the result is rounded once or twice, and the sum has another order
        torch.testing.assert_close(out, theirs(total).detach(), rtol=(3 if is_cut else 2) * eps, atol=1e-6)
        alone, _ = normalize(x[3:4], theirs.weight.detach(), 1e-5, None if added is None else added[3:4], is_offset)
        assert torch.equal(out[3:4], alone)


def test_other_widths_are_refused() -> None:
    from foredraft.kernels.gpu.norm import normalize

    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ForedraftError, match=r"do not fit weight \[4\]"):
        normalize(x, x[0, :4], 1e-5)
    with pytest.raises(ForedraftError, match=r"and residual \[1, 8\]"):
        normalize(x, x[0], 1e-5, x[:1])
