"""Training batches of corpus windows, in an order that depends on the step only.

A resumed run therefore continues with the batch after its last step.
"""

import numpy as np
import torch
from torch import Tensor


class WindowBatches:
    """Batches of windows of equal length.

    Each pass over the corpus cuts it at a new offset and shuffles the windows, so that no window repeats in a pass.

    Args:
        ids: token ids of the corpus, [T].
        context: tokens per window, without the last target token.
        rows: windows per batch.
        seed: seed of the order.
        device: device of the batches. Default "cpu".

    Raises:
        ValueError: the corpus is shorter than a batch.
    """

    def __init__(self, ids: np.ndarray, context: int, rows: int, seed: int, device: str = "cpu") -> None:
        self._context, self._rows, self._seed = context, rows, seed
        self._ids = torch.from_numpy(np.asarray(ids).astype(np.int16)).to(device)  # [T]; ids fit: V = 4096
        self._offsets = torch.arange(context + 1, device=device)
        self._num_windows = len(ids) // context - 1
        self.batches_per_pass = self._num_windows // rows
        if self.batches_per_pass < 1:
            raise ValueError(f"{len(ids)} tokens hold no batch of {rows} windows of {context} tokens")
        self._pass_index, self._starts = -1, torch.empty(0)

    def get_batch(self, index: int) -> Tensor:
        """Return the token ids of the batch of step `index`, [rows, context + 1]."""
        pass_index, batch_index = divmod(index, self.batches_per_pass)
        if pass_index != self._pass_index:
            rng = np.random.default_rng((self._seed, pass_index))
            offset = int(rng.integers(self._context))
            order = torch.from_numpy(rng.permutation(self._num_windows))
            self._pass_index, self._starts = pass_index, (offset + self._context * order).to(self._ids.device)
        starts = self._starts[batch_index * self._rows : (batch_index + 1) * self._rows]
        return self._ids[starts[:, None] + self._offsets].long()
