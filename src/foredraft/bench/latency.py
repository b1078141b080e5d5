"""Latency of plain decoding and of drafting methods on the same weights and prompts.

All methods generate from a prompt before the next prompt begins. Their order rotates, so that a slow minute of the
machine affects all methods alike. Later turns of a conversation always contain the answers of plain decoding: prompts
stay equal even if an output differs once.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from foredraft.bench.methods import PLAIN
from foredraft.bench.pass_limits import LimitsMeter, PassLimits
from foredraft.bench.questions import PromptBuilder, Question
from foredraft.errors import ForedraftError
from foredraft.outputs import Completion, Stats, sum_stats
from foredraft.sampling.params import Sampling
from foredraft.verification.registry import RULES

WARM_UP_TOKENS = 16  # output tokens per method before the measurement
LIMITS_INTERVAL = 8  # questions between two measurements of the machine


class TextGenerator(Protocol):
    """The method of LLM that the benchmark uses."""

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Completion]: ...


@dataclass(frozen=True)
class PromptRun:
    """Results of one method for one prompt, over all rounds."""

    completions: tuple[Completion, ...]  # one per round
    times: tuple[float, ...]  # seconds, one per round
    category: str = ""  # category of the question

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    @property
    def tokens(self) -> list[int]:
        return self.completions[0].token_ids


@dataclass(frozen=True)
class LatencyRow:
    """Figures of one method over all prompts."""

    method: str
    tokens_per_second: float
    speed_up: float  # median over prompts of (plain's time per token / the method's)
    acceptance_length: float  # tokens per forward pass of the target, bonus token included
    acceptance_rate: float
    per_position: tuple[float, ...]  # share of drafts accepted up to each position
    draft_share: float  # time in the drafter over wall time
    target_passes: int
    identical: int | None  # prompts with the output of plain decoding; None if sampled without a common seed
    prompts: int
    num_tokens: int
    seconds: float  # sum over prompts of the median over rounds
    verification: str  # name of the verification rule
    limit_tokens_per_second: float | None = None  # if only the target's passes over output and drafts took time

    @property
    def agreement(self) -> str:
        return "sampled" if self.identical is None else f"{self.identical}/{self.prompts}"


@dataclass
class LatencyOutcome:
    """Results of all methods; every turn of a question is one prompt."""

    runs: dict[str, list[PromptRun]]
    too_long: list[str] = field(default_factory=list)  # questions whose prompt at some turn exceeds the context


def measure(
    generators: Mapping[str, TextGenerator],
    questions: Sequence[Question],
    tokenizer: Any,
    context_length: int,
    sampling: Sampling,
    rounds: int,
    on_progress: Callable[[str], None],
    cached_after: int = 0,
    meter: LimitsMeter | None = None,
) -> LatencyOutcome:
    """Warm up all methods, then measure every prompt.

    Args:
        generators: method label -> LLM; PLAIN must be among the labels.
        questions: prompts in turns; a question ends at the first turn that exceeds the context.
        tokenizer: tokenizer of the target.
        context_length: tokens of prompt and output together.
        sampling: settings of every prompt.
        rounds: repetitions of every prompt.
        on_progress: called with the label of a method before it generates.
        cached_after: output tokens that each method generates from a prompt before its time counts, so that the prompt
            is in the prefix cache and the time is that of decoding. Default 0 = the time includes the prompt.
        meter: measures the machine between questions. Default None = it is not measured.

    Raises:
        ForedraftError: a method failed.
    """
    warm_up = replace(sampling, max_tokens=min(WARM_UP_TOKENS, sampling.max_tokens), min_tokens=0)
    first_prompt = tokenizer(questions[0].turns[0]).input_ids
    for name, generator in generators.items():
        on_progress(f"warming up {name}")
        _time_generation(name, generator, first_prompt[: max(1, context_length - warm_up.max_tokens)], warm_up)
    names, outcome = list(generators), LatencyOutcome({name: [] for name in generators})
    for number, question in enumerate(questions):
        if meter is not None and number % LIMITS_INTERVAL == 0:
            meter.measure()
        conversation = PromptBuilder(tokenizer)
        for turn, text in enumerate(question.turns):
            prompt = conversation.add_user_turn(text)
            if len(prompt) + sampling.max_tokens > context_length:
                outcome.too_long.append(question.name)
                break
            results: dict[str, list[tuple[Completion, float]]] = {name: [] for name in names}
            for repeat in range(rounds):
                shift = (number + turn + repeat) % len(names)
                for name in names[shift:] + names[:shift]:
                    on_progress(name)
                    if cached_after:
                        _time_generation(name, generators[name], prompt, replace(sampling, max_tokens=cached_after))
                    results[name].append(_time_generation(name, generators[name], prompt, sampling))
            for name, pairs in results.items():
                completions, times = zip(*pairs, strict=True)
                outcome.runs[name].append(PromptRun(completions, times, question.category))
            answer = outcome.runs[PLAIN][-1].completions[0]
            conversation.add_answer(answer.token_ids, answer.text)
    if meter is not None:
        meter.measure()
    return outcome


def _time_generation(
    name: str, generator: TextGenerator, prompt: list[int], sampling: Sampling
) -> tuple[Completion, float]:
    start = time.perf_counter()
    (completion,) = generator.generate([prompt], sampling)
    seconds = time.perf_counter() - start
    if completion.error is not None:
        raise ForedraftError(f"{name} failed: {completion.error}")
    return completion, seconds


def build_rows(outcome: LatencyOutcome, sampling: Sampling, limits: PassLimits | None = None) -> list[LatencyRow]:
    """Build the rows of the table, plain decoding first.

    Args:
        outcome: what was measured.
        sampling: settings of every prompt.
        limits: of the target on this machine; None = rows have no limit.

    Raises:
        ForedraftError: no prompt was measured.
    """
    plain = outcome.runs[PLAIN]
    if not plain:
        raise ForedraftError("no prompt fits the model's context with --max-tokens; ask for fewer tokens")
    return [_build_row(name, runs, plain, sampling, limits) for name, runs in outcome.runs.items()]


def build_category_rows(outcome: LatencyOutcome, sampling: Sampling) -> dict[str, list[LatencyRow]]:
    """Build one table per category, in the order of the questions; empty if questions have no category."""
    categories = dict.fromkeys(run.category for run in outcome.runs[PLAIN] if run.category)
    outcomes = {
        name: LatencyOutcome(
            {method: [run for run in runs if run.category == name] for method, runs in outcome.runs.items()}
        )
        for name in categories
    }
    return {name: build_rows(category_outcome, sampling) for name, category_outcome in outcomes.items()}


def _build_row(
    name: str, runs: Sequence[PromptRun], plain: Sequence[PromptRun], sampling: Sampling, limits: PassLimits | None
) -> LatencyRow:
    stats: Stats = sum_stats(completion.stats for run in runs for completion in run.completions)
    tokens, seconds = sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)
    rule_name = runs[0].completions[0].verification
    rule = RULES.get(rule_name)  # None = simulated acceptance, which is in no list
    is_reproducible = sampling.is_greedy or (sampling.seed is not None and rule is not None and rule.is_reproducible)
    pairs = list(zip(runs, plain, strict=True))
    return LatencyRow(
        method=name,
        tokens_per_second=tokens / seconds,
        speed_up=statistics.median(_compute_token_seconds(base) / _compute_token_seconds(run) for run, base in pairs),
        acceptance_length=stats.acceptance_length,
        acceptance_rate=stats.acceptance_rate,
        per_position=stats.per_position,
        draft_share=stats.draft_time / sum(sum(run.times) for run in runs),
        target_passes=stats.target_passes,
        identical=sum(run.tokens == base.tokens for run, base in pairs) if is_reproducible else None,
        prompts=len(runs),
        num_tokens=tokens,
        seconds=seconds,
        verification=rule_name,
        limit_tokens_per_second=None if limits is None else limits.compute_draft_speed(stats),
    )


def _compute_token_seconds(run: PromptRun) -> float:
    """Compute seconds per token, because outputs that end early may differ in length."""
    return run.seconds / max(1, len(run.tokens))
