"""Keyed random numbers on the GPU, with the bits of `sampling/rng.py`."""

import triton
import triton.language as tl

MASK = (1 << 64) - 1
GOLDEN_NUMBER = 0x9E3779B97F4A7C15
GOLDEN = tl.constexpr(GOLDEN_NUMBER)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
# Increments of the counters of `NoiseStream`: (stream + 1) * GOLDEN. Products of constants are not cut to 64 bits.
TOKEN_STREAM = tl.constexpr(GOLDEN_NUMBER)
ACCEPT_STREAM = tl.constexpr((2 * GOLDEN_NUMBER) & MASK)
RESIDUAL_STREAM = tl.constexpr((3 * GOLDEN_NUMBER) & MASK)
LOW_52 = tl.constexpr((1 << 52) - 1)
STEP_52 = tl.constexpr(2.0**-52)
HALF_STEP_52 = tl.constexpr(2.0**-53)
SERIES_END = tl.constexpr(0.125)  # 1 - u below which the series of -log(u) is used


@triton.jit
def mix_state(state):
    """Mix 64-bit states: the finaliser of SplitMix64."""
    state = (state ^ (state >> 30)) * MIX_1
    state = (state ^ (state >> 27)) * MIX_2
    return state ^ (state >> 31)


@triton.jit
def add_counter(state, counter):
    """Return the state after one more counter, which is not negative."""
    return mix_state(state + (counter.to(tl.uint64) + 1) * GOLDEN)


@triton.jit
def derive_token_key(state, position):
    """Return the key of the token at a position, from the state after seed and sample index."""
    return add_counter(mix_state(state + TOKEN_STREAM), position)


@triton.jit
def compute_accept_uniform(state, position, node):
    """Return the uniform of a draft node, counted from the root at `position`."""
    return convert_to_uniform(add_counter(add_counter(mix_state(state + ACCEPT_STREAM), position), node))


@triton.jit
def compute_sample_uniform(state, position, node):
    """Return the uniform that samples the token after a node, counted from the root at `position`."""
    return convert_to_uniform(add_counter(add_counter(mix_state(state + RESIDUAL_STREAM), position), node))


@triton.jit
def convert_to_uniform(key):
    """Return the float64 number in (0, 1) of a 64-bit key."""
    return (key >> 12).to(tl.float64) * STEP_52 + HALF_STEP_52


@triton.jit
def mix_token_states(key, ids):
    """Return the mixed states of token ids [N] in a race."""
    return mix_state(key + (ids.to(tl.uint64) + 1) * GOLDEN)


@triton.jit
def estimate_exponentials(states):
    """Return -log(u) of mixed states [N] in float32, to a relative error below 2^-18.

    Near u = 1 the difference to 1 is taken from the integer, because these tokens win races.
    """
    rest = ((~(states >> 12)) & LOW_52).to(tl.float32)
    v = (rest + 0.5) * STEP_52
    series = v * (1.0 + v * (0.5 + v * (0.33333333 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    u = ((states >> 12).to(tl.float32) + 0.5) * STEP_52
    return tl.where(v < SERIES_END, series, -tl.log(tl.where(v < SERIES_END, 0.5, u)))
