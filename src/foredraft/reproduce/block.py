"""Block verification against token-wise verification of the same draft model."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foredraft.bench.latency import PromptRun
from foredraft.bench.methods import PLAIN
from foredraft.bench.plot import Curve, CurvePanel
from foredraft.bench.questions import Question
from foredraft.bench.report import ReportTable
from foredraft.llm import LLM
from foredraft.reproduce.chain_ratios import ChainRecorder, ExpectedPoint, build_expected_point
from foredraft.reproduce.claim import Claim, Measurement, Source
from foredraft.reproduce.workbench import MODES, SAMPLED, Workbench
from foredraft.verification.rules import BLOCK, REJECT

LENGTHS = (2, 4, 6, 8)  # draft lengths K
RESAMPLES = 2000  # of the prompts, for the standard error


@dataclass(frozen=True)
class RulePoint:
    """Figures of one rule at one draft length."""

    rule: str
    num_tokens: int  # K
    acceptance_length: float
    standard_error: float  # of the acceptance length, by resampling the prompts
    speed_up: float  # median over prompts


def measure(bench: Workbench) -> Measurement:
    """Measure both rules at temperature 1."""
    llm, lengths, method = bench.small_target, bench.choose(LENGTHS, LENGTHS[:2]), bench.name_draft()
    labels = {f"{rule.name}, K = {length}": (rule, length) for length in lengths for rule in (REJECT, BLOCK)}
    generators = {PLAIN: llm} | {
        label: bench.add_drafter(llm, f"{method}:{length}", rule=rule) for label, (rule, length) in labels.items()
    }
    prompts, tokens, rounds = bench.load_prompts(16), bench.choose(96, 12), bench.choose(2, 1)
    runs = bench.run(generators, SAMPLED, prompts, tokens, rounds).runs
    points = [build_rule_point(rule.name, length, runs[label], runs[PLAIN]) for label, (rule, length) in labels.items()]
    expected = [_record_drafts(bench, llm, f"{method}:{length}", length, prompts, tokens) for length in lengths]
    return Measurement(
        findings=(*_compare_expected(expected), *_compare(points)),
        notes=(
            bench.describe_target(llm),
            f"{bench.describe_runs(prompts, tokens)}; T = 1 without a seed, rounds: {rounds}",
            "runs of their own: every run samples another output; the standard error is that of resampled prompts",
            "the same drafts: p / q of every draft token is recorded; the expected accepted tokens follow from it",
        ),
        tables=(_build_expected_table(expected), _build_table(points)),
        panels=_draw(points, expected),
        data={"points": points, "expected": expected},
    )


def _record_drafts(
    bench: Workbench, llm: LLM, text: str, length: int, prompts: Sequence[Question], tokens: int
) -> ExpectedPoint:
    """Decode with token-wise verification, and compute what both rules accept of these drafts in expectation."""
    recorder = ChainRecorder()
    drafting = bench.add_drafter(llm, text, rule=replace(REJECT, verify=recorder))
    sampling = replace(MODES[SAMPLED], max_tokens=tokens)
    for question in prompts:
        bench.on_progress(f"recording drafts, K = {length}")
        drafting.generate([question.turns[0]], sampling)
    return build_expected_point(length, recorder.chains)


def _compare_expected(expected: Sequence[ExpectedPoint]) -> list[str]:
    return [
        f"K = {p.num_tokens}, the same {p.num_drafts:,} drafts: block accepts {p.block:.3f} draft tokens in "
        f"expectation and token-wise {p.token_wise:.3f}, {100 * (p.block / p.token_wise - 1):+.1f} %; more of "
        f"{p.num_more:,} drafts, fewer of {p.num_fewer}"
        for p in expected
    ]


def _build_expected_table(expected: Sequence[ExpectedPoint]) -> ReportTable:
    header = ("K", "drafts", "token-wise", "as a block", "gain", "block more", "block fewer")
    rows = tuple(
        (
            str(p.num_tokens), str(p.num_drafts), f"{p.token_wise:.3f}", f"{p.block:.3f}",
            f"{100 * (p.block / p.token_wise - 1):+.1f} %", str(p.num_more), str(p.num_fewer),
        )
        for p in expected
    )  # fmt: skip
    return ReportTable("Expected accepted draft tokens, of the same drafts", header, rows)


def build_rule_point(rule: str, length: int, runs: Sequence[PromptRun], plain: Sequence[PromptRun]) -> RulePoint:
    """Build the figures of one rule from its runs and those of plain decoding."""
    counts = [
        (sum(c.stats.num_tokens for c in run.completions), sum(c.stats.target_passes for c in run.completions))
        for run in runs
    ]
    rng = random.Random(0)
    resampled = [_compute_length(rng.choices(counts, k=len(counts))) for _ in range(RESAMPLES)]
    speed_ups = [base.seconds / run.seconds for base, run in zip(plain, runs, strict=True)]
    return RulePoint(rule, length, _compute_length(counts), statistics.pstdev(resampled), statistics.median(speed_ups))


def _compute_length(counts: Sequence[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in counts) / sum(passes for _, passes in counts)


def _find_pairs(points: Sequence[RulePoint]) -> list[tuple[RulePoint, RulePoint]]:
    """Pair the points of each length: token-wise, block. They are measured in this order."""
    return list(zip(points[::2], points[1::2], strict=True))


def _compare(points: Sequence[RulePoint]) -> list[str]:
    sentences = []
    for token_wise, block in _find_pairs(points):
        error = (token_wise.standard_error**2 + block.standard_error**2) ** 0.5
        sentences.append(
            f"K = {block.num_tokens}, runs of their own: block has {block.acceptance_length:.2f} tokens a pass and "
            f"token-wise {token_wise.acceptance_length:.2f} (standard error of the difference {error:.2f}); "
            f"{block.speed_up:.2f}x and {token_wise.speed_up:.2f}x over plain decoding"
        )
    return sentences


def _build_table(points: Sequence[RulePoint]) -> ReportTable:
    header = ("rule", "K", "acceptance length", "standard error", "speed-up")
    rows = tuple(
        (p.rule, str(p.num_tokens), f"{p.acceptance_length:.3f}", f"{p.standard_error:.3f}", f"{p.speed_up:.2f}x")
        for p in points
    )
    return ReportTable("Both rules", header, rows, num_name_columns=2)


def _draw(points: Sequence[RulePoint], expected: Sequence[ExpectedPoint]) -> tuple[CurvePanel, ...]:
    ticks = tuple(sorted({float(p.num_tokens) for p in points}))
    speeds = []
    for color, rule in enumerate(dict.fromkeys(p.rule for p in points)):
        group = [p for p in points if p.rule == rule]
        speeds.append(Curve(rule, ticks, tuple(p.speed_up for p in group), color))
    lengths = (
        Curve(REJECT.name, ticks, tuple(p.token_wise for p in expected), 0),
        Curve(BLOCK.name, ticks, tuple(p.block for p in expected), 1),
    )
    panel = CurvePanel(
        "Expected accepted tokens of the same drafts, T = 1", "draft length K", "draft tokens", lengths, None, ticks,
        from_zero=False,
    )  # fmt: skip
    return panel, replace(
        panel,
        title="Speed-up at T = 1",
        y_label="over plain decoding",
        curves=tuple(speeds),
        baseline=1,
        from_zero=True,
    )


NAME: str = "block"
CLAIM = Claim(
    name=NAME,
    title="Block verification",
    statement="Verifying a draft as a block never accepts fewer tokens in expectation than token by token",
    sources=(
        Source(
            "2403.10444",
            "Block Verification Accelerates Speculative Decoding",
            "Optimal in the expected number of tokens, never worse, and 5 to 8 % faster in wall-clock time",
        ),
    ),
    minutes=2,
    measure=measure,
)
