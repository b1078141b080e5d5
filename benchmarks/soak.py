"""Long run of mixed requests to a server in this process; memory, threads and open files must not grow.

    python benchmarks/soak.py --requests 20000 --out soak.json [--model builtin] [--spec-method draft_model]

The requests are those of tests/support/server/soak.py: greedy requests with known output, sampling, streams, chats, 3 %
grammars, clients that disconnect, and invalid bodies. --out is written after every round; its "samples" show the
progress. The exit code is 1 if, in the second half, memory grows by more than 1 MiB per 1,000 requests or the number of
threads or open files changes, or if any answer is wrong. Other programs may run on the machine.
"""

import argparse
import logging
import sys
from pathlib import Path

from foredraft import LLM
from foredraft.llm import MemoryLimits
from tests.support.server import live_server
from tests.support.server.soak import soak

TOKENS = 256  # of KV memory, less than concurrent requests need


def create_llm(model: str, method: str | None) -> LLM:
    """Create the LLM from a folder or name; `small` means the random float64 model of the tests."""
    limits = MemoryLimits(kv_tokens=TOKENS, max_batch=32)
    if model == "small":
        llm = live_server.make_small_llm().with_drafter(None)
        llm.limits = limits
        return llm.with_drafter(live_server.make_small_llm().drafter)
    return LLM(model, limits=limits) if method is None else LLM(model, method, limits=limits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--each", type=int, default=100, help="requests between two samples of the process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="builtin", help="'small' for the random model of the tests")
    parser.add_argument("--spec-method")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # refused requests
    llm = create_llm(options.model, options.spec_method)
    report = soak(llm, options.requests, options.each, options.seed, options.out)
    print(report.table())
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
