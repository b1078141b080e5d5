"""Speculative decoding inside transformers' `generate`."""
