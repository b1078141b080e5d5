"""Training with a target that runs on a server: traces and texts by HTTP, the target's tables from its folder."""
