"""Gemma-4 assistants: small decoders without keys and values of their own, which read those of the target."""
