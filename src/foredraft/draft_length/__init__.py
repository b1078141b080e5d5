"""Draft-length policies, with estimates of acceptance and of the time of a forward pass."""
