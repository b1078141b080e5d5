"""The package `tests` for scripts that run as `python benchmarks/NAME.py`, which find only this folder's modules."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[1] / "tests")]
