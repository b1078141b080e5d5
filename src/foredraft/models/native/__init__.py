"""Decoders and draft layers that run as one native call per forward pass, on CPU."""
