"""The corpus cut to windows, in an order that the step alone decides: a stopped run goes on with the next batch."""

import numpy as np
import torch
from torch import Tensor


class Batches:
    """Batches of windows of one length. Every pass over the corpus cuts it at a fresh offset and shuffles the windows,
    so no window comes twice in a pass."""

    def __init__(self, ids: np.ndarray, context: int, rows: int, seed: int, device: str = "cpu") -> None:
        self._context, self._rows, self._seed = context, rows, seed
        self._ids = torch.from_numpy(np.asarray(ids).astype(np.int16)).to(device)  # [T]; ids fit: V = 4096
        self._along = torch.arange(context + 1, device=device)
        self._windows = len(ids) // context - 1
        self.per_pass = self._windows // rows
        if self.per_pass < 1:
            raise ValueError(f"{len(ids)} tokens hold no batch of {rows} windows of {context} tokens")
        self._pass, self._starts = -1, torch.empty(0)

    def at(self, index: int) -> Tensor:
        """[rows, context + 1] the batch of a step."""
        number, place = divmod(index, self.per_pass)
        if number != self._pass:
            rng = np.random.default_rng((self._seed, number))
            offset = int(rng.integers(self._context))
            order = torch.from_numpy(rng.permutation(self._windows))
            self._pass, self._starts = number, (offset + self._context * order).to(self._ids.device)
        starts = self._starts[place * self._rows : (place + 1) * self._rows]
        return self._ids[starts[:, None] + self._along].long()
