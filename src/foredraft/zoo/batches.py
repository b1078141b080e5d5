"""The corpus cut to windows, in an order that the step alone decides: a stopped run goes on with the next batch."""

import numpy as np
import torch
from torch import Tensor


class WindowBatches:
    """Batches of windows of one length. Every pass over the corpus cuts it at a fresh offset and shuffles the windows,
    so no window comes twice in a pass."""

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
        """[rows, context + 1] the batch of a step."""
        number, place = divmod(index, self.batches_per_pass)
        if number != self._pass_index:
            rng = np.random.default_rng((self._seed, number))
            offset = int(rng.integers(self._context))
            order = torch.from_numpy(rng.permutation(self._num_windows))
            self._pass_index, self._starts = number, (offset + self._context * order).to(self._ids.device)
        starts = self._starts[place * self._rows : (place + 1) * self._rows]
        return self._ids[starts[:, None] + self._offsets].long()
