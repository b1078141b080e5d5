"""The method `mtp`: a multi-token-prediction layer, which is a decoder layer of the target's own class."""
