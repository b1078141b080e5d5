"""KL divergence of two distributions over a whole vocabulary, and its gradient, in one pass over the logits."""

from typing import Any

import torch
from torch import Tensor

MIN_LOG_PROB = -1e4  # floor that keeps 0 * log 0 finite
CACHED_ROWS = 16  # rows per piece on a CPU: float32 rows of a few thousand tokens stay in its cache


class FusedKL(torch.autograd.Function):
    """KL(p || q) of logits that define q, with the gradient q * sum(p) - p computed beside it.

    Operation by operation, a dozen tensors of the size of the logits go through the memory. Here pieces of some rows
    stay in the cache of a CPU, and the gradient alone is kept, in the dtype of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_p: Tensor) -> Tensor:
        """Return the divergences [..] from logits [.., V] and log p [.., V], which gets no gradient."""
        divergences = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for out, grad, rows, log_p_rows in zip(
            *(_split_rows(x, 1 + (x is not divergences)) for x in (divergences, gradient, logits, log_p)), strict=True
        ):
            log_q, p = rows.float().log_softmax(-1), log_p_rows.exp()
            out.copy_((p * (log_p_rows.clamp_min(MIN_LOG_PROB) - log_q)).sum(-1))
            grad.copy_(log_q.exp_().mul_(p.sum(-1, keepdim=True)).sub_(p))
        ctx.save_for_backward(gradient)
        return divergences

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        # In place, as there is one backward pass. Autograd refuses a second one, since a saved tensor has changed.
        return gradient.mul_(grads[0][..., None]), None


def _split_rows(x: Tensor, num_dims: int) -> list[Tensor]:
    """Split a tensor into views of its last `num_dims` axes; on a CPU of at most `CACHED_ROWS` of the first of them."""
    size = CACHED_ROWS if x.device.type == "cpu" else max(1, x.shape[-num_dims])
    matrices = [x]
    while matrices[0].dim() > num_dims:
        matrices = [part for matrix in matrices for part in matrix.unbind(0)]
    return [part for matrix in matrices for part in torch.split(matrix, size)]
