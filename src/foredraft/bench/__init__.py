"""Benchmarks of `foredraft bench`: latency, comparison with other programs, load, kernels and grown models."""
