"""Walks down a token tree that kernels have: what a verification rule does, in one call."""

from enum import IntEnum


class TreeWalk(IntEnum):
    """Walk down a token tree."""

    SAMPLES = 1  # to the child that equals the target's sample
    TRIALS = 2  # to the first child that a trial accepts, with a residual after every rejection
    CHAIN = 3  # the longest prefix of a chain that passes a joint test
