"""Sampling of tokens from rows of logits with keyed noise.

It runs natively if possible, otherwise by `distribution` and a race, with the same tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.kernels.sampler import UNCERTAIN, find_sampler
from foredraft.sampling import rng
from foredraft.sampling.distribution import TokenHistory, compute_reference_probs, process_logits
from foredraft.sampling.params import Sampling

NO_TOKEN = -1  # sampled token of a row with invalid logits


def sample_tokens(
    logits: Tensor,
    rows: Sequence[int],
    samplings: Sequence[Sampling],
    keys: Sequence[int],
    history: Sequence[TokenHistory] | None = None,
) -> list[int]:
    """Sample a token in each of some rows.

    Args:
        logits: [N, V], not modified.
        rows: R rows of the logits.
        samplings: R sampling parameters.
        keys: R noise keys.
        history: R token histories; needed if a sampling parameter shapes logits (`Sampling.shapes_logits`).

    Returns:
        R tokens, `NO_TOKEN` for a row with invalid logits (NaN, +inf, or no token left).
    """
    x, indices = logits, rows
    if any(s.shapes_logits for s in samplings):
        x, indices = process_logits(select_rows(logits, rows), samplings, history), range(len(rows))
    sampler = find_sampler(x)
    if sampler is None:
        return _sample_by_reference(process_logits(select_rows(x, indices), ()), samplings, keys)
    tokens = sampler.sample_tokens(x, indices, [s.filter_settings for s in samplings], keys)
    for i, token in enumerate(tokens):
        if token == UNCERTAIN:
            row = process_logits(select_rows(x, [indices[i]]), ())
            tokens[i] = _sample_by_reference(row, [samplings[i]], [keys[i]])[0]
    return tokens


def select_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of the logits, as a view if they are consecutive."""
    first, size = rows[0], len(rows)
    if rows[-1] == first + size - 1 and list(rows) == list(range(first, first + size)):
        return logits[first : first + size]
    return logits[list(rows)]


def _sample_by_reference(x: Tensor, samplings: Sequence[Sampling], keys: Sequence[int]) -> list[int]:
    """Sample from processed logits [R, V] by torch's operators."""
    p = compute_reference_probs(x, samplings)
    if p.device.type == "cpu":
        rows = p.numpy()
        return [
            NO_TOKEN if row[0] != row[0] else rng.race_argmax(row, key) for row, key in zip(rows, keys, strict=True)
        ]
    tokens = rng.exponential_race(p, torch.tensor(keys, device=p.device)).argmax(-1)
    return tokens.masked_fill_(p[:, 0].isnan(), NO_TOKEN).tolist()
