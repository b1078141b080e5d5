"""Acceptance of several drafts of one draft model: SpecTr's selection (2310.15141) beside rejection sampling.

    python benchmarks/spectr.py [--drafts 2,4,8] [--length 4] [--prompts 20] [--samples 4] [--max-tokens 128]
                                [--only TEXT]

The built-in pair at temperature 1, from the prompts of `foredraft bench latency`. `chains` are independent samples
from the root, and equal prefixes share nodes. `multi-round` is SpecInfer's verification of the same drafts: `reject`,
whose residual takes q after every rejected sample. `reject, fixed` parts at the root into different tokens, and
`reject, dynamic` is a sampled EAGLE-2 tree; both have as many nodes as the chains. Speed is not measured: all requests
share batches. The deviation is the standard error over requests.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foredraft import LLM, Sampling
from foredraft.bench.questions import PromptBuilder, load_questions
from foredraft.outputs import Stats, sum_stats
from foredraft.verification.registry import find_rule
from foredraft.verification.rule import Rule

LABELS = ("spectr", "reject", "block")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    label: str
    rule: Rule
    options: dict[str, Any]


def list_cases(drafts: Sequence[int], length: int) -> Iterator[Case]:
    """Yield chains of one draft, then every number of drafts under every rule and shape."""
    spectr, reject, block = (find_rule(label) for label in LABELS)
    assert spectr is not None
    assert reject is not None
    assert block is not None
    yield Case("reject, 1 chain", reject, {})
    yield Case("block, 1 chain", block, {})
    multi_round = replace(reject, name="multi-round", draws_independently=True)
    for k in drafts:
        yield Case(f"spectr, {k} chains", spectr, {"num_drafts": k})
        yield Case(f"multi-round, {k} chains", multi_round, {"num_drafts": k})
        yield Case(f"reject, fixed, {k} chains", reject, {"num_drafts": k})
        yield Case(f"reject, dynamic, {k * length} nodes", reject, {"tree_nodes": k * length, "top_k": max(k, 4)})


def compute_acceptance_length(stats: Sequence[Stats]) -> float:
    """Return tokens per forward pass that verified a draft."""
    total = sum_stats(stats)
    return 1 + total.num_accepted / total.num_drafts


def compute_standard_error(stats: Sequence[Stats]) -> float:
    """Return the standard error of the acceptance length by the jackknife over requests."""
    others = [compute_acceptance_length([*stats[:i], *stats[i + 1 :]]) for i in range(len(stats))]
    return statistics.pstdev(others) * (len(stats) - 1) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", default="2,4,8", help="numbers of drafts, separated by commas")
    parser.add_argument("--length", type=int, default=4, help="tokens of each draft")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4, help="outputs of each prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--only", default="", help="measure the rows whose label contains this text")
    args = parser.parse_args()
    plain = LLM(drafter=None)
    questions = load_questions(None, args.prompts)
    prompts = [PromptBuilder(plain.tokenizer).add_user_turn(question.turns[0]) for question in questions]
    sampling = Sampling(max_tokens=args.max_tokens, temperature=1.0, seed=1, n=args.samples, ignore_eos=True)
    print("| rule and drafts | acceptance length | first token accepted | nodes verified per pass |")
    print("|---|---|---|---|")
    for case in list_cases([int(k) for k in args.drafts.split(",")], args.length):
        if args.only not in case.label:
            continue
        llm = plain.with_drafter({"method": "draft_model", **case.options}, args.length, verify=case.rule)
        stats = [completion.stats for completion in llm.generate(prompts, sampling)]
        total = sum_stats(stats)
        print(
            f"| {case.label} | {compute_acceptance_length(stats):.3f} ± {compute_standard_error(stats):.3f} | "
            f"{total.per_position[0]:.3f} | {total.num_drafted / total.num_drafts:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
