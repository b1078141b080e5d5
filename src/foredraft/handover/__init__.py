"""Handover of a deployment to another engine: what starts the same there, and what has no equal.

`engines/` has one table for each engine, and `registry.py` finds them. `plan.py` translates the options of
`foredraft serve` and the drafter into a `Handover`; `formats/` writes it as a command, a compose file, a Kubernetes
manifest or a configuration of Ray Serve. Nothing here starts an engine or reads weights.
"""
