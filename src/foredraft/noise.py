"""Counter-based randomness: every draw is a pure function of (seed, sample, position, purpose, index).

Integer arithmetic only, so the bits are the same on every device and do not depend on batch, step, draft length or
preemption. The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood, 2014).
"""

import enum
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bits = NDArray[np.uint64]
KEPT = 1 << 20  # numbers of noise kept for each vocabulary size: 8 MB

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class Purpose(enum.IntEnum):
    """Streams that must never share a bit."""

    TOKEN = 0  # the target's own draw, shared with the drafter under `match`
    ACCEPT = 1  # the coin that accepts a drafted token
    DRAW = 2  # the residual or bonus draw
    DRAFT = 3  # the drafter's draws under `reject`


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def key(seed: int, *counters: int) -> int:
    """A 64-bit key, as a signed integer, for a seed and a path of counters."""
    state = _mix((seed + _GOLDEN) & _MASK)
    for counter in counters:
        state = _mix((state + (counter + 1) * _GOLDEN) & _MASK)
    return _signed(state)


def coin(seed: int, *counters: int) -> float:
    """One uniform number in the open interval (0, 1)."""
    return ((key(seed, *counters) & _MASK) >> 12) * 2.0**-52 + 2.0**-53


def _mix_tensor(x: Tensor) -> Tensor:
    # int64 has no logical shift: shift, then clear the copies of the sign bit
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@lru_cache(maxsize=8)
def _steps(count: int) -> Bits:
    """[count] what every column adds to the key."""
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def _uniform_bits(states: Bits) -> NDArray[np.float64]:
    """Numbers in (0, 1) from the states before mixing, which are overwritten. The processor's own unsigned integers,
    in place: a third of the time of the tensor arithmetic, and the same bits."""
    spare = states >> 30
    states ^= spare
    states *= np.uint64(_MIX_1)
    np.right_shift(states, 27, out=spare)
    states ^= spare
    states *= np.uint64(_MIX_2)
    np.right_shift(states, 31, out=spare)
    states ^= spare
    states >>= 12
    u = states.astype(np.float64)
    u += 0.5
    u *= 2.0**-52
    return u


def uniforms(keys: Tensor, count: int) -> Tensor:
    """[R] int64 keys -> [R, count] float64 in the open interval (0, 1); column i depends on (key, i) alone."""
    if keys.device.type == "cpu":
        return torch.from_numpy(_uniform_bits(keys.numpy().view(np.uint64)[:, None] + _steps(count)))
    index = torch.arange(1, count + 1, device=keys.device) * _signed(_GOLDEN)
    bits = _mix_tensor(keys[:, None] + index)
    # 52 bits and a half: the largest value is below one and exactly representable
    return ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)


def race(p: Tensor, keys: Tensor) -> Tensor:
    """[R, V] scores whose argmax is a draw from p and whose top k are k draws without replacement.

    The exponential race p / E with E ~ Exp(1), which is the Gumbel-argmax without its second logarithm. Where p is
    zero the score is zero and never wins.
    """
    return p.double() / uniforms(keys, p.shape[-1]).log_().neg_()


def winner(p: NDArray[np.floating], key: int) -> int:
    """The argmax of `race` for one row p [V] that has some mass. Only tokens of some probability run."""
    if np.count_nonzero(p) * 4 < len(p):
        ids = np.flatnonzero(p)
        states = _steps(len(p))[ids] + np.uint64(key & _MASK)
        return int(ids[(p[ids] / _logs(states)).argmin()])  # both signs turned, so the largest is the smallest
    return int((p / _every_log(len(p))(key)).argmin())


def _logs(states: Bits) -> NDArray[np.float64]:
    """The logarithm is torch's, as in `race`: its last bit is not numpy's."""
    u = _uniform_bits(states)
    torch.from_numpy(u).log_()
    return u


@lru_cache(maxsize=4)
def _every_log(count: int) -> Callable[[int], NDArray[np.float64]]:
    """key -> [count], the newest of them kept: under `match` the target races where the drafter did before, and again
    where a draft was rejected."""

    @lru_cache(maxsize=max(4, KEPT // count))
    def logs(key: int) -> NDArray[np.float64]:
        made = _logs(_steps(count) + np.uint64(key & _MASK))
        made.flags.writeable = False
        return made

    return logs
