"""Layer norm of rows: as torch computes it, and the same bits whatever rows are beside it."""

import pytest
import torch
from torch.nn import functional as F

from foredraft.errors import ForedraftError
from tests.support.gpu_cases import DEVICE, TRITON

pytestmark = TRITON


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("width", [64, 100])
def test_equal_to_the_norm_of_torch(dtype: torch.dtype, width: int) -> None:
    from foredraft.kernels.gpu.layer_norm import normalize_layer

    noise = torch.Generator().manual_seed(width)
    x = (torch.randn(5, width, generator=noise) * 3 + 7).to(DEVICE, dtype)
    weight, bias = (torch.randn(width, generator=noise).to(DEVICE, dtype) for _ in range(2))
    for factors, added in ((weight, bias), (weight, None), (None, None)):
        out = normalize_layer(x, factors, added, 1e-5)
        wide = [None if tensor is None else tensor.double() for tensor in (factors, added)]
        expected = F.layer_norm(x.double(), (width,), *wide, 1e-5)
        # one rounding, a cut in the interpreter; float32 sums of numbers that are larger than their differences
        torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
        assert torch.equal(normalize_layer(x[3:4], factors, added, 1e-5), out[3:4])


def test_other_widths_are_refused() -> None:
    from foredraft.kernels.gpu.layer_norm import normalize_layer

    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ForedraftError, match=r"rows \[2, 8\] do not fit bias \[4\]"):
        normalize_layer(x, None, x[0, :4], 1e-5)
