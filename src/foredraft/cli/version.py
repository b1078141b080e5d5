"""`foredraft version`: versions and hardware, for bug reports."""

import json
import platform
import sys
from importlib import metadata
from typing import Annotated, Any

import typer

import foredraft
from foredraft.kernels.cpu.features import read_cpu_features


def collect_facts() -> dict[str, Any]:
    """Return versions, CPU features, number of threads, native kernels in use and GPU, by name."""
    import torch

    from foredraft.kernels.cpu.library import load_library

    native = load_library()
    has_cuda = torch.cuda.is_available()
    return {
        "foredraft": foredraft.__version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_features": read_cpu_features(),
        "threads": torch.get_num_threads(),
        "kernels": None if native is None else native.instruction_set,
        "cuda": torch.cuda.get_device_name(0) if has_cuda else None,
    }


def print_version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Print versions, CPU features, number of threads, native kernels in use and GPU."""
    facts = collect_facts()
    if as_json:
        sys.stdout.write(json.dumps(facts) + "\n")
        return
    for name, value in facts.items():
        text = " ".join(value) if isinstance(value, list) else "no" if value is None else str(value)
        sys.stdout.write(f"{name.replace('_', ' '):<14}{text or '-'}\n")
