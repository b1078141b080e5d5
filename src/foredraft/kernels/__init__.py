"""Operators of the forward pass: native code for processors, and fallbacks in torch."""
