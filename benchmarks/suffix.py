"""Cost of suffix decoding: a token added to a long history and looked up in it, in every source.

    python benchmarks/suffix.py [--tokens 1000000] [--block 10000] [--json FILE]

The standard library as tokens of the built-in target (repeated with a shift of every id where it has too few), and as
many at random, which branch more. `update`: every token is added to a text. `own text`: and a draft of eight is made
after it. `files`: the history is a file's; another text is followed through it, with a draft after every token.
`store`: the same, the history four sections of past outputs of one tenant, all followed at once. Times are this
thread's processor time, the median over blocks and the worst block; memory is what the automata hold.
"""

import argparse
import json
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from foredraft import zoo
from foredraft.drafters.suffix import DISCOUNTS
from foredraft.drafters.suffix_cache import SuffixCache, select_longest
from foredraft.kernels.automaton import RankedDraftSpec, SuffixMatch, build_discount_table
from foredraft.kernels.cpu.suffix import get_automaton_class
from foredraft.models.loading import load_tokenizer

DRAFT = RankedDraftSpec(max_nodes=8, max_depth=8, min_probability=0.1)
VOCAB = 4096
ALLOWED = 20.0  # microseconds for a token


@dataclass(frozen=True)
class SuffixRow:
    """One way of using a history."""

    text: str
    source: str
    microseconds: float  # per token, the median over blocks
    worst: float  # of all blocks
    bytes_per_token: float


def load_code_tokens(count: int) -> list[int]:
    """Token ids of the standard library."""
    tokenizer = load_tokenizer(str(zoo.find_folder("target")))
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if len(ids) >= count:
            break
        ids += tokenizer(path.read_text(encoding="utf-8", errors="ignore"), verbose=False).input_ids
    shift = 0
    while len(ids) < count:
        shift += 1
        ids += [(token + shift) % VOCAB for token in ids]
    return ids[:count]


def time_blocks(work: Callable[[int], None], tokens: Sequence[int], size: int) -> list[float]:
    """Microseconds per token of every block."""
    found = []
    for start in range(0, len(tokens), size):
        block = tokens[start : start + size]
        began = time.thread_time()
        for token in block:
            work(token)
        found.append((time.thread_time() - began) / len(block) * 1e6)
    return found


def measure_history(name: str, history: Sequence[int], other: Sequence[int], block: int) -> list[SuffixRow]:
    kind, table = get_automaton_class(), build_discount_table(DISCOUNTS)

    def row(source: str, times: Sequence[float], num_bytes: int) -> SuffixRow:
        one = SuffixRow(name, source, statistics.median(times), max(times), num_bytes / len(history))
        print(f"{name:8} {source:10} {one.microseconds:9.2f} {one.worst:7.2f} {one.bytes_per_token:12.1f}", flush=True)
        return one

    own, added = kind(), kind()
    places: list[SuffixMatch] = []

    def grow(token: int) -> None:
        own.extend([token])
        kind.draft([own.match_end()], table, DRAFT)

    def follow(token: int) -> None:
        places[:] = kind.advance(places, [token])
        kind.draft(select_longest(places), table, DRAFT)

    rows: list[SuffixRow] = []
    rows.append(row("update", time_blocks(lambda token: added.extend([token]), history, block), added.num_bytes))
    rows.append(row("own text", time_blocks(grow, history, block), own.num_bytes))
    places[:] = [SuffixMatch(own)]
    rows.append(row("files", time_blocks(follow, other, block), own.num_bytes))
    store = SuffixCache(len(history), 1, kind)
    store.add(b"", history)
    places[:] = [SuffixMatch(section.automaton) for section in store.list_sections(b"")]
    rows.append(row("store", time_blocks(follow, other, block), store.num_bytes))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--block", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    draw = random.Random(0)
    part = max(args.tokens // 10, args.block)
    ids = load_code_tokens(args.tokens + part)
    print(f"{args.tokens} tokens of history, {get_automaton_class().__name__}")
    print(f"{'text':8} {'source':10} {'us/token':>9} {'worst':>7} {'bytes/token':>12}")
    rows = measure_history("code", ids[: args.tokens], ids[args.tokens :], args.block)
    noise = [draw.randrange(VOCAB) for _ in range(args.tokens + part)]
    rows += measure_history("random", noise[: args.tokens], noise[args.tokens :], args.block)
    slowest = max(row.microseconds for row in rows)
    print(f"slowest median: {slowest:.1f} us, {ALLOWED:g} allowed: {'held' if slowest < ALLOWED else 'NOT HELD'}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
