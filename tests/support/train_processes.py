"""Program for one of several processes: training runs of given methods, one after the other.

torchrun starts it: `-m tests.support.train_processes FOLDER OUT PLANS`, with PLANS a JSON list of [method, settings of
the method, changes of the plan].
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from foredraft.train.config import EvaluationConfig
from foredraft.train.distributed import close_processes
from foredraft.train.run import train
from tests.support.train_fakes import LINEAR, plan

EVALUATED = {"evaluation": EvaluationConfig(prompts=3, tokens=12), "held_out_share": 0.2, "steps": 4}


def run(folder: Path, out: str, method: str, settings: dict[str, str], **changes: object) -> Path:
    """Train one drafter into `out/method`. The method `linear` is that of the tests."""
    chosen = replace(plan(folder, f"{out}/{method}", settings=settings, **{**EVALUATED, **changes}), method=method)
    return train(chosen, method=LINEAR if method == LINEAR.name else None).folder


def main(folder: str, out: str, plans: str) -> None:
    for method, settings, changes in json.loads(plans):
        run(Path(folder), out, method, settings, **changes)
    close_processes()
    # A thread that is left may abort the process at its exit, though only now and then.
    left = [name for name in list_thread_names() if "gloo" in name]
    assert not left, left


def list_thread_names() -> list[str]:
    """List the names of this process's threads; empty on a system without /proc."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


if __name__ == "__main__":
    main(*sys.argv[1:])
