"""Counter-based random numbers: pure functions of a seed and a path of counters.

The counters are sample index, stream, sequence position and index. Integer arithmetic makes the bits equal on every
device, and independent of batch, step, draft length and preemption.

Reference: the mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood, 2014).
"""

import enum
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UInt64Array = NDArray[np.uint64]
MAX_CACHED_VALUES = 1 << 20  # cached float64 values for each vocabulary size: 8 MB
SPARSE_FACTOR = 4  # a race runs over the tokens with mass alone if they are fewer than one in this many

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class NoiseStream(enum.IntEnum):
    """Independent streams of random numbers of a request."""

    TOKEN = 0  # samples of the target; a sampling drafter under `match` uses the same
    ACCEPT = 1  # uniforms that accept or reject draft tokens
    RESIDUAL = 2  # uniforms that sample corrected and bonus tokens
    DRAFT = 3  # samples of the drafter under `reject`


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def derive_key(seed: int, *counters: int) -> int:
    """Return the 64-bit key of a seed and a path of counters, as a signed integer."""
    return extend_key(_mix((seed + _GOLDEN) & _MASK), *counters)


def extend_key(key: int, *counters: int) -> int:
    """Return the key of a path that continues with these counters, from the key of its first part (`derive_key`)."""
    state = key & _MASK
    for counter in counters:
        state = _mix((state + (counter + 1) * _GOLDEN) & _MASK)
    return _to_signed(state)


def uniform(seed: int, *counters: int) -> float:
    """Return one uniform random number in the open interval (0, 1)."""
    return ((derive_key(seed, *counters) & _MASK) >> 12) * 2.0**-52 + 2.0**-53


def _mix_tensor(x: Tensor) -> Tensor:
    # int64 has no logical shift, so the copies of the sign bit are cleared after each shift.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _to_signed(_MIX_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _to_signed(_MIX_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@lru_cache(maxsize=8)
def _make_key_increments(count: int) -> UInt64Array:
    """Return the number that each column adds to the key, [count]."""
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def _convert_to_uniforms(states: UInt64Array) -> NDArray[np.float64]:
    """Mix the states and return uniforms in (0, 1); the states are overwritten.

    Unsigned integers of numpy, in place, take a third of the time of `_mix_tensor` and give the same bits.
    """
    shifted = states >> 30
    states ^= shifted
    states *= np.uint64(_MIX_1)
    np.right_shift(states, 27, out=shifted)
    states ^= shifted
    states *= np.uint64(_MIX_2)
    np.right_shift(states, 31, out=shifted)
    states ^= shifted
    states >>= 12
    u = states.astype(np.float64)
    u += 0.5
    u *= 2.0**-52
    return u


def extend_keys(keys: Tensor, counters: Tensor) -> Tensor:
    """Return keys with one more counter each: `derive_key` on any device, without a wait for it.

    Args:
        keys: keys of `derive_key`, int64.
        counters: further counters at least 0, int64, of a shape that broadcasts with the keys.
    """
    return _mix_tensor(keys + (counters + 1) * _to_signed(_GOLDEN))


def uniform_matrix(keys: Tensor, count: int) -> Tensor:
    """Return uniforms [R, count] float64 in (0, 1) for keys [R] int64; column i depends only on the key and i."""
    if keys.device.type == "cpu":
        return torch.from_numpy(
            _convert_to_uniforms(keys.numpy().view(np.uint64)[:, None] + _make_key_increments(count))
        )
    index = torch.arange(1, count + 1, device=keys.device) * _to_signed(_GOLDEN)
    bits = _mix_tensor(keys[:, None] + index)
    # 52 bits plus a half: the largest value is below 1 and exactly representable.
    return ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)


def exponential_race(p: Tensor, keys: Tensor) -> Tensor:
    """Return scores [R, V] whose argmax is a sample of p, and whose top k are k samples without replacement.

    The scores are p / E with E exponential: the Gumbel-max trick without its second logarithm. A token with p = 0 has
    score 0 and never wins.

    Reference: 1411.0030.
    """
    return p.double() / uniform_matrix(keys, p.shape[-1]).log_().neg_()


def race_argmax(p: NDArray[np.floating], key: int) -> int:
    """Return the argmax of `exponential_race` for one row p [V] with positive mass.

    The scores are divided by log u instead of -log u, so the winner is the argmin.
    """
    if np.count_nonzero(p) * SPARSE_FACTOR < len(p):
        ids = np.flatnonzero(p)
        states = _make_key_increments(len(p))[ids] + np.uint64(key & _MASK)
        return int(ids[(p[ids] / _compute_log_uniforms(states)).argmin()])
    return int((p / _make_log_cache(len(p))(key)).argmin())


def _compute_log_uniforms(states: UInt64Array) -> NDArray[np.float64]:
    """Return log u with torch's logarithm, as in `exponential_race`; numpy's differs in the last bit."""
    u = _convert_to_uniforms(states)
    torch.from_numpy(u).log_()
    return u


@lru_cache(maxsize=4)
def _make_log_cache(count: int) -> Callable[[int], NDArray[np.float64]]:
    """Return a cached function from key to log u [count].

    Under `match` the target uses the keys that the drafter used before, and again after a rejection.
    """

    @lru_cache(maxsize=max(4, MAX_CACHED_VALUES // count))
    def logs(key: int) -> NDArray[np.float64]:
        log_uniforms = _compute_log_uniforms(_make_key_increments(count) + np.uint64(key & _MASK))
        log_uniforms.flags.writeable = False
        return log_uniforms

    return logs
