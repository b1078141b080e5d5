"""LoRA adapters that are applied per request: reading, and their changes of a pass."""
