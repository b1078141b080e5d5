"""A long run of mixed requests against a server in this process: memory, threads and open files must not grow.

    python benchmarks/soak.py --requests 20000 --out soak.json [--model builtin] [--spec-method draft_model]

The requests are those of tests/server/server_soak.py: known texts, samples, streams, chats, 3 % grammars, clients
that leave, bodies that are refused. --out is written after every round; its "samples" show how far the run is. Exit
code 1 if memory grows by more than 1 MiB per 1,000 requests in the second half, if threads or open files change there,
or if any answer is wrong. The machine may be busy.
"""

import argparse
import logging
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "server")]
import live_server  # noqa: E402
from server_soak import soak  # noqa: E402

from foredraft import LLM  # noqa: E402
from foredraft.llm import MemoryLimits  # noqa: E402

TOKENS = 256  # of KV memory: less than the requests at once want


def create_llm(model: str, method: str | None) -> LLM:
    """`small`: random float64 weights of the tests; otherwise a folder or a name."""
    limits = MemoryLimits(kv_tokens=TOKENS, max_batch=32)
    if model == "small":
        other = live_server.make_small_llm().with_drafter(None)
        other.limits = limits
        return other.with_drafter(live_server.make_small_llm().drafter)
    return LLM(model, limits=limits) if method is None else LLM(model, method, limits=limits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--each", type=int, default=100, help="requests between two looks at the process")
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
