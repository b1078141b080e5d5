"""Table of the drafters of 2025 and 2026 beside EAGLE-3: chains and trees, greedy and sampled, one and four streams.

    python benchmarks/new_drafters.py [--model MODEL] [--heads FOLDER ...] [--rows NAME,...] [--workload code]
                                      [--grown FOLDER] [--prompts 12] [--max-tokens 128] [--streams 1,4]
                                      [--markdown FILE]

A cell has the acceptance length, bonus token included, the speed over plain decoding, and the share that was reached of
the limit, at which only the target's passes over output and drafts take time. The speed is the median over groups of
prompts of the ratio of seconds. A group has as many prompts as streams, which begin together and have equal numbers of
tokens. All rows take turns group by group. A sampled run has no seed, so the rule is that of `--verify`.

A drafter is a folder of this name in one of `--heads`, or the built-in one; the row is left out without it. The recipe
of the built-in DFlash head has the Markov head of DSpark. These commands train the drafters that are not built in, with
a target TARGET, documents DATA and the folder HEADS:

    foredraft train mtp --model TARGET --data DATA --out HEADS/mtp --set loss=kl
    foredraft train eagle3 --model TARGET --data DATA --out HEADS/p_eagle --set parallel=true
    foredraft train mlp_speculator --model TARGET --data DATA --out HEADS/lstm --set cell=lstm
    foredraft train draft_model --model TARGET --data DATA --out HEADS/pard --set parallel=true

For the built-in target: `--model builtin --data builtin --optimizer muon --lr 2e-3`. `--grown FOLDER` measures a target
that `foredraft bench grow` made of MODEL, whose passes wait for memory, with the drafters of MODEL.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foredraft import LLM, Sampling, zoo
from foredraft.bench import methods, questions
from foredraft.bench.methods import PLAIN
from foredraft.bench.pass_limits import LimitsMeter, PassLimits
from foredraft.cli.backend import silence_transformers
from foredraft.drafter_factory import DrafterFactory
from foredraft.drafters.interface import Drafter
from foredraft.drafters.registry import load_methods
from foredraft.outputs import Stats, sum_stats
from foredraft.reproduce.narrow_features import NarrowFeatures

WARM_UP_TOKENS = 16
DEFAULT_NUM_TOKENS = 5  # draft length of a row that names none, beside a grown target
MODES = {"greedy": Sampling(temperature=0.0, ignore_eos=True), "T = 1": Sampling(temperature=1.0, ignore_eos=True)}


@dataclass(frozen=True)
class Row:
    """Row of the table.

    Attributes:
        method: method with its options, as `foredraft bench latency --methods` takes it.
        folder: name of the drafter's folder; "" = the method has none.
        member: member of an ensemble that has the folder; "" = the method itself.
    """

    method: str
    folder: str = ""
    member: str = ""


ROWS = {
    "EAGLE-3, chain": Row("eagle3:5", "eagle3"),
    "EAGLE-3, tree": Row("eagle3:5:tree_nodes=12", "eagle3"),
    "DFlash, chain": Row("dflash:5", "dflash"),
    "DFlash, tree": Row("dflash:5:tree_nodes=12", "dflash"),
    "MTP, chain": Row("mtp:3", "mtp"),
    "MTP, tree": Row("mtp:3:tree_nodes=12", "mtp"),
    "P-EAGLE, chain": Row("eagle3:5:parallel=true", "p_eagle"),
    "P-EAGLE, tree": Row("eagle3:5:parallel=true:tree_nodes=12", "p_eagle"),
    "PARD, chain": Row("draft_model:5:parallel=true", "pard"),
    "PARD, tree": Row("draft_model:5:parallel=true:tree_nodes=12", "pard"),
    "LSTM speculator, chain": Row("mlp_speculator:4", "lstm"),
    "LSTM speculator, tree": Row("mlp_speculator:4:tree_nodes=12", "lstm"),
    "suffix + LSTM speculator": Row("suffix+mlp_speculator:8", "lstm", "mlp_speculator"),
    "suffix + EAGLE-3": Row("suffix+eagle3:8", "eagle3", "eagle3"),
    "token recycling, tree": Row("token_recycling"),
}


@dataclass(frozen=True)
class GroupRun:
    """Run of one row for one group of prompts."""

    seconds: float
    stats: Stats


def find_drafter(folder: str, heads: Sequence[Path]) -> str | None:
    """Return the folder of a drafter: below one of `heads`, or built in; None if there is none."""
    found = next((path / folder for path in heads if (path / folder / "config.json").exists()), None)
    return zoo.find_installed(folder) if found is None else str(found)


def make_generators(llm: LLM, small: LLM, rows: Mapping[str, Row], heads: Sequence[Path]) -> dict[str, LLM]:
    """Return plain decoding and one LLM per row whose drafter exists.

    Args:
        llm: target.
        small: model that the target was grown from, which its drafters were trained for; the target itself if it was
            not grown.
        rows: rows by title.
        heads: folders of drafters.
    """
    generators = {PLAIN: llm}
    for title, row in rows.items():
        spec = dict(methods.parse(row.method, list(load_methods())).spec)
        if row.folder:
            path = find_drafter(row.folder, heads)
            if path is None:
                print(f"{title}: no folder {row.folder}; see --help for the command that trains it", file=sys.stderr)
                continue
            spec[f"{row.member}.model" if row.member else "model"] = path
        generators[title] = llm.with_drafter(spec if small is llm else make_small_drafter(small, spec))
    return generators


def make_small_drafter(small: LLM, spec: dict[str, Any]) -> Drafter:
    """Make a drafter of a small target for use beside one that was grown from it."""
    factory = DrafterFactory(small.target, small.tokenizer, small.fused, small.builtin)
    drafter, _ = factory.make(spec, int(spec.get("num_speculative_tokens", DEFAULT_NUM_TOKENS)))
    assert drafter is not None
    return NarrowFeatures(drafter, small.target.hidden_size) if drafter.spec.hidden_layers else drafter


def measure(
    generators: Mapping[str, LLM], prompts: Sequence[list[int]], streams: int, sampling: Sampling, meter: LimitsMeter
) -> dict[str, list[GroupRun]]:
    """Run all groups of `streams` prompts through all rows in rotating order; an incomplete last group is left out.

    The machine is measured before every group.
    """
    names = list(generators)
    for name in names:
        run_group(generators[name], prompts[:streams], replace(sampling, max_tokens=WARM_UP_TOKENS))
    runs: dict[str, list[GroupRun]] = {name: [] for name in names}
    for number in range(len(prompts) // streams):
        meter.measure()
        group, shift = prompts[number * streams : (number + 1) * streams], number % len(names)
        for name in names[shift:] + names[:shift]:
            print(f"\r{streams} streams, group {number + 1}: {name:30}", end="", file=sys.stderr)
            runs[name].append(run_group(generators[name], group, sampling))
    return runs


def run_group(llm: LLM, prompts: Sequence[list[int]], sampling: Sampling) -> GroupRun:
    start = time.perf_counter()
    completions = llm.generate(list(prompts), sampling)
    seconds = time.perf_counter() - start
    errors = [completion.error for completion in completions if completion.error is not None]
    if errors:
        raise RuntimeError(errors[0])
    return GroupRun(seconds, sum_stats(completion.stats for completion in completions))


def format_cell(runs: Sequence[GroupRun], plain: Sequence[GroupRun], streams: int, limits: PassLimits | None) -> str:
    speed_up = statistics.median(base.seconds / run.seconds for run, base in zip(runs, plain, strict=True))
    stats = sum_stats(run.stats for run in runs)
    cell = f"{stats.acceptance_length:.2f} · {speed_up:.2f}x"
    if limits is None:
        return cell
    speed = stats.num_tokens / sum(run.seconds for run in runs)
    return f"{cell} · {speed / limits.compute_draft_speed(stats, streams):.0%}"


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--grown", type=Path)
    parser.add_argument("--heads", type=Path, nargs="*", default=[])
    parser.add_argument("--rows", default=None, help="titles that begin with one of these, separated by commas")
    parser.add_argument("--workload", default="code")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--verify", default="auto", help="verification rule")
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    silence_transformers()
    small = LLM(options.model, drafter=None, verify=options.verify)
    llm = small if options.grown is None else LLM(options.grown, drafter=None, verify=options.verify)
    starts = tuple(options.rows.split(",")) if options.rows else ("",)
    generators = make_generators(llm, small, {t: row for t, row in ROWS.items() if t.startswith(starts)}, options.heads)
    tokenizer: Any = llm.tokenizer
    texts = [question.turns[0] for question in questions.load_questions(Path(options.workload), options.prompts)]
    prompts = [tokenizer(text).input_ids for text in texts]
    columns: dict[str, dict[str, str]] = {}
    for streams in map(int, options.streams.split(",")):
        for mode, sampling in MODES.items():
            title, meter = f"{mode}, {streams} stream{'s' * (streams > 1)}", LimitsMeter(llm.target)
            runs = measure(generators, prompts, streams, replace(sampling, max_tokens=options.max_tokens), meter)
            columns[title] = {name: format_cell(runs[name], runs[PLAIN], streams, meter.limits) for name in generators}
            if meter.limits is not None:
                print(f"\r{title}: {meter.limits.describe_machine()}", file=sys.stderr)
    lines = ["| drafter | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name in generators:
        lines.append(f"| {name} | " + " | ".join(cells[name] for cells in columns.values()) + " |")
    text = "\n".join(lines)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
