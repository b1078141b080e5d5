"""Vocabulary of an EAGLE-3 head: `d2t` holds offsets, so target id = draft id + d2t[draft id]."""

import torch
from torch import Tensor

from foredraft.checkpoints.tensor_claims import INTEGER_DTYPES, ExpectedTensor, TensorClaims
from foredraft.drafters.eagle3.shape import Eagle3Shape


def make_expected_offsets(shape: Eagle3Shape) -> ExpectedTensor:
    """Return the expected shape and dtypes of d2t."""
    return ExpectedTensor((shape.draft_vocab_size,), INTEGER_DTYPES)


def list_optional_maps(claims: TensorClaims, shape: Eagle3Shape) -> dict[str, ExpectedTensor]:
    """List the redundant maps of a checkpoint: t2d always, and d2t if the draft has the whole vocabulary."""
    maps = {"d2t": make_expected_offsets(shape), "t2d": ExpectedTensor((shape.vocab_size,), (torch.bool,))}
    return {name: expected for name, expected in maps.items() if name in claims}


def compute_target_ids(d2t: Tensor) -> Tensor:
    """Return [Vd] the target's token id of every draft id."""
    return torch.arange(len(d2t)) + d2t.long()


def check_maps(claims: TensorClaims, shape: Eagle3Shape) -> None:
    """Read the maps alone and check them, before any weight is read.

    Raises:
        ForedraftError: if d2t is no table of offsets in ascending order of target ids, or t2d contradicts it.
    """
    maps = claims.read(name for name in ("d2t", "t2d") if name in claims)
    if "d2t" not in maps:
        return
    ids = compute_target_ids(maps["d2t"])
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= shape.vocab_size:
        raise claims.refuse(
            f"d2t leads to token {lowest if lowest < 0 else highest}, out of range 0 to {shape.vocab_size - 1}; it has "
            "to hold offsets (target id - draft id), not ids, of this target's tokens"
        )
    descents = (ids[1:] <= ids[:-1]).nonzero()
    if len(descents):
        i = int(descents[0]) + 1
        raise claims.refuse(
            f"d2t is not ascending: draft tokens {i - 1} and {i} are tokens {int(ids[i - 1])} and {int(ids[i])}; "
            "it has to hold offsets (target id - draft id) of sorted ids"
        )
    if "t2d" in maps and not torch.equal(maps["t2d"].nonzero().flatten(), ids):
        raise claims.refuse("t2d and d2t name different tokens; one of them belongs to another drafter")
