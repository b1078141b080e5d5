"""KV memory: pages, pools, the prefix cache and the KV cache of drafters."""
