"""Tensor parallelism on one machine: several processes, each with a part of the target's weights and KV."""
