"""Results of a part: one line each as they come, and a JSON file that is complete after every line."""

import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Describe the GPU and the versions, with which every figure must be read."""
    import triton

    names = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    if not torch.cuda.is_available():
        return {"gpu": None, **names}
    found = torch.cuda.get_device_properties(0)
    return {"gpu": found.name, "capability": f"{found.major}.{found.minor}", "cuda": torch.version.cuda, **names}


@dataclass
class Report:
    """Results of one part."""

    path: Path
    results: list[dict[str, Any]] = field(default_factory=list)
    num_failed: int = 0

    def add(self, name: str, is_right: bool | None, **figures: Any) -> None:
        """Add a result; `is_right` is None for a figure that is neither right nor wrong."""
        word = {None: "     ", True: "ok   ", False: "WRONG"}[is_right]
        print(word, name, *(f"{key}={value}" for key, value in figures.items()))
        self.num_failed += is_right is False
        self.results.append({"name": name, "is_right": is_right, **figures})
        self.path.write_text(json.dumps({"machine": describe_machine(), "results": self.results}, indent=1) + "\n")

    def run(self, name: str, check: Any) -> None:
        """Add the result of a check, which returns (is_right, figures); an error is a wrong result."""
        try:
            is_right, figures = check()
        except Exception as error:  # the next check may still tell something
            is_right, figures = False, {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
        self.add(name, is_right, **figures)
