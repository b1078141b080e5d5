"""Training of drafters: data, traces of the target, one loop for every method, and a replay of the verifier.

A method that can be trained has `TrainConfig` and `trainee(config, target, start)`, or, if it only counts,
`learn(config, documents, target, out)`; nothing here knows which methods there are.
"""
