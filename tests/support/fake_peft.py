"""Presence of the optional library peft, for tests that only check settings."""

import importlib.util


def allow_lora(monkeypatch) -> None:
    """Let settings with LoRA pass on a machine without peft."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
