"""Models: forward passes of targets and draft models over paged KV, loading, n-gram tables and prompts."""
