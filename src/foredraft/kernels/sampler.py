"""The native sampler: from rows of logits to probabilities, or to tokens sampled with keyed noise.

Its probabilities have the bits of `sampling/weights.py` and `sampling/filters.py`. Its tokens are those of
`sampling/rng.py`, or `UNCERTAIN` if two scores are so close that rounding decides; such a row is left to the reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.kernels.cpu.library import NativeLibrary, load_library
from foredraft.kernels.cpu.records import SamplingRecord

UNCERTAIN = -2  # "token" of a race that rounding decides
# Relative distance of the two best scores below which rounding may decide: 8 times that of two float32 numbers.
RACE_MARGIN = 2.0**-20

# (temperature, top_k, top_p, min_p, typical_p) of a row; temperature 0 = greedy
RowSettings = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class NativeSampler:
    """Sampler of the native library, for float32 and bfloat16 logits on the CPU."""

    library: NativeLibrary
    margin: float = RACE_MARGIN

    def compute_probs(self, logits: Tensor, settings: Sequence[RowSettings]) -> Tensor:
        """Return probabilities [R, V] float32 of logits [R, V], NaN throughout for rows without a distribution."""
        probs = torch.empty(logits.shape, dtype=torch.float32)
        self._run(logits, range(len(logits)), settings, probs=probs)
        return probs

    def sample_tokens(
        self, logits: Tensor, rows: Sequence[int], settings: Sequence[RowSettings], keys: Sequence[int]
    ) -> list[int]:
        """Sample a token in each of some rows.

        Args:
            logits: [N, V].
            rows: R rows of the logits.
            settings: R settings.
            keys: R signed 64-bit noise keys.

        Returns:
            R tokens; -1 for a row without a distribution, `UNCERTAIN` for a row that is left to the reference.
        """
        tokens = np.empty(len(rows), dtype=np.int32)
        self._run(logits, rows, settings, keys=keys, tokens=tokens)
        return tokens.tolist()

    def compute_masses(
        self, logits: Tensor, rows: Sequence[int], settings: Sequence[RowSettings]
    ) -> list[tuple[NDArray[np.intp] | None, NDArray[np.float64]] | None]:
        """Return the probabilities of some rows, normalised in float64.

        Args:
            logits: [N, V].
            rows: R rows of the logits.
            settings: R settings.

        Returns:
            For each row token ids, ascending, and their masses; None and the masses of all tokens, if few are zero;
            None if the row has no distribution.
        """
        shape = len(rows), logits.shape[-1]
        masses, ids, counts = np.empty(shape), np.empty(shape, dtype=np.int64), np.zeros(len(rows), dtype=np.int32)
        self._run(logits, rows, settings, masses=masses, ids=ids, counts=counts)
        found: list[tuple[NDArray[np.intp] | None, NDArray[np.float64]] | None] = []
        for row_masses, row_ids, count in zip(masses, ids, counts.tolist(), strict=True):
            if count > 0:
                found.append((row_ids[:count].copy(), row_masses[:count].copy()))  # without the rest of the arrays
            else:
                found.append((None, row_masses) if count else None)
        return found

    def _run(
        self,
        logits: Tensor,
        rows: Sequence[int],
        settings: Sequence[RowSettings],
        keys: Sequence[int] = (),
        probs: Tensor | None = None,
        tokens: NDArray[np.int32] | None = None,
        masses: NDArray[np.float64] | None = None,
        ids: NDArray[np.int64] | None = None,
        counts: NDArray[np.int32] | None = None,
    ) -> None:
        vocab_size = logits.shape[-1]
        self.library.sync_threads()
        indices, packed = np.array(rows, dtype=np.int64), np.array(settings, dtype=np.float64)
        noise_keys = np.array(keys, dtype=np.int64)
        job = SamplingRecord(
            logits.data_ptr(),
            indices.ctypes.data,
            packed.ctypes.data,
            noise_keys.ctypes.data,
            None if probs is None else probs.data_ptr(),
            *(None if out is None else out.ctypes.data for out in (tokens, masses, ids, counts)),
            logits.stride(0),
            self.margin,
            len(rows),
            vocab_size,
            logits.dtype == torch.bfloat16,
        )
        if self.library.handle.fd_sample(job):
            raise MemoryError(f"no memory to sample from {vocab_size} tokens")


def find_sampler(logits: Tensor) -> NativeSampler | None:
    """Return the sampler for logits [R, V]; None if they are not its kind, or without the native library."""
    if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(-1) != 1:
        return None
    library = load_library()
    return None if library is None else NativeSampler(library)
