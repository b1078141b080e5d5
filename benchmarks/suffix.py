"""Cost of suffix decoding per token, to extend a long history and to look up drafts in it.

    python benchmarks/suffix.py [--tokens 1000000] [--block 10000] [--json FILE]

The history is the standard library as tokens of the built-in target, or as many random tokens, which branch more. If
the library has too few tokens, it is repeated with shifted ids. Sources:

- `update`: every token extends the history of a request.
- `own text`: in addition, eight tokens are drafted after every token.
- `files`: the history is a fixed corpus; another sequence is matched in it, with a draft after every token.
- `store`: the same, with a history of past outputs of one tenant in several sections, which are matched together.

Times are processor time of the thread: the median over blocks, and the slowest block. Memory is that of the automata.
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
from foredraft.drafters.suffix.automaton import RankedDraftSpec, SuffixMatch, build_discount_table
from foredraft.drafters.suffix.drafter import DISCOUNTS
from foredraft.drafters.suffix.native_automaton import get_automaton_class
from foredraft.drafters.suffix.output_cache import SuffixCache, select_longest
from foredraft.models.loading import load_tokenizer

DRAFT = RankedDraftSpec(max_nodes=8, max_depth=8, min_probability=0.1)
VOCAB = 4096
ALLOWED = 20.0  # maximum microseconds per token


@dataclass(frozen=True)
class SuffixRow:
    """Cost of one source for one history."""

    text: str
    source: str
    microseconds: float  # per token, the median over blocks
    worst: float  # per token, in the slowest block
    bytes_per_token: float


def load_code_tokens(count: int) -> list[int]:
    """Load token ids of the standard library, repeated with shifted ids if they are too few."""
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


def time_blocks(process: Callable[[int], None], tokens: Sequence[int], size: int) -> list[float]:
    """Measure microseconds per token for every block."""
    microseconds = []
    for start in range(0, len(tokens), size):
        block = tokens[start : start + size]
        start = time.thread_time()
        for token in block:
            process(token)
        microseconds.append((time.thread_time() - start) / len(block) * 1e6)
    return microseconds


def measure_history(name: str, history: Sequence[int], other: Sequence[int], block: int) -> list[SuffixRow]:
    automaton_class, table = get_automaton_class(), build_discount_table(DISCOUNTS)

    def make_row(source: str, times: Sequence[float], num_bytes: int) -> SuffixRow:
        row = SuffixRow(name, source, statistics.median(times), max(times), num_bytes / len(history))
        print(f"{name:8} {source:10} {row.microseconds:9.2f} {row.worst:7.2f} {row.bytes_per_token:12.1f}", flush=True)
        return row

    automaton, update_automaton = automaton_class(), automaton_class()
    matches: list[SuffixMatch] = []

    def extend_and_draft(token: int) -> None:
        automaton.extend([token])
        automaton_class.draft([automaton.match_end()], table, DRAFT)

    def advance_and_draft(token: int) -> None:
        matches[:] = automaton_class.advance(matches, [token])
        automaton_class.draft(select_longest(matches), table, DRAFT)

    rows: list[SuffixRow] = []
    rows.append(
        make_row(
            "update",
            time_blocks(lambda token: update_automaton.extend([token]), history, block),
            update_automaton.num_bytes,
        )
    )
    rows.append(make_row("own text", time_blocks(extend_and_draft, history, block), automaton.num_bytes))
    matches[:] = [SuffixMatch(automaton)]
    rows.append(make_row("files", time_blocks(advance_and_draft, other, block), automaton.num_bytes))
    cache = SuffixCache(len(history), 1, automaton_class)
    cache.add(b"", history)
    matches[:] = [SuffixMatch(section.automaton) for section in cache.list_sections(b"")]
    rows.append(make_row("store", time_blocks(advance_and_draft, other, block), cache.num_bytes))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--block", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = random.Random(0)
    num_other = max(args.tokens // 10, args.block)
    ids = load_code_tokens(args.tokens + num_other)
    print(f"{args.tokens} tokens of history, {get_automaton_class().__name__}")
    print(f"{'text':8} {'source':10} {'us/token':>9} {'worst':>7} {'bytes/token':>12}")
    rows = measure_history("code", ids[: args.tokens], ids[args.tokens :], args.block)
    noise = [rng.randrange(VOCAB) for _ in range(args.tokens + num_other)]
    rows += measure_history("random", noise[: args.tokens], noise[args.tokens :], args.block)
    slowest = max(row.microseconds for row in rows)
    print(f"slowest median: {slowest:.1f} us, {ALLOWED:g} allowed: {'met' if slowest < ALLOWED else 'MISSED'}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
