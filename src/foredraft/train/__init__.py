"""Training of drafters: data, traces of the target, one loop for every method, and acceptance by replay.

A method that can be trained declares a `Training`: `create_trainee(config, target, start)`, or, if it only counts
tokens, `learn(config, documents, target, out)`. This package does not know which methods exist.
"""
