"""Plain decoding and drafting methods on the same weights and prompts, in turn, prompt by prompt.

Every prompt goes through all of them before the next prompt, in rotating order, so that a slow minute of the machine
hits all alike. All of them read plain decoding's answers in the later turns of a conversation: a text that differs
once must not make the prompts differ.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from foredraft.bench.methods import PLAIN
from foredraft.bench.questions import PromptBuilder, Question
from foredraft.cli.speed_figures import sum_stats
from foredraft.errors import ForedraftError
from foredraft.outputs import Completion, Stats
from foredraft.sampling.params import Sampling

WARM_UP_TOKENS = 16


class TextGenerator(Protocol):
    """An LLM, as the benchmark sees it."""

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Completion]: ...


@dataclass(frozen=True)
class PromptRun:
    """One prompt through one method, `rounds` times."""

    completions: tuple[Completion, ...]  # of every round
    times: tuple[float, ...]
    category: str = ""  # of the question

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    @property
    def tokens(self) -> list[int]:
        return self.completions[0].token_ids


@dataclass(frozen=True)
class LatencyRow:
    """One method over all prompts."""

    method: str
    tokens_per_second: float
    speed_up: float  # median over prompts of plain's time for a token over the method's
    acceptance_length: float  # tokens per target pass, bonus included
    acceptance_rate: float
    per_position: tuple[float, ...]
    draft_share: float  # of the time
    target_passes: int
    identical: int | None  # prompts whose text is plain decoding's; None where texts are drawn, not determined
    prompts: int
    num_tokens: int
    seconds: float
    verification: str

    @property
    def agreement(self) -> str:
        return "drawn" if self.identical is None else f"{self.identical}/{self.prompts}"


@dataclass
class LatencyOutcome:
    """Runs of every method; a prompt is (question, turn)."""

    runs: dict[str, list[PromptRun]]
    too_long: list[str] = field(default_factory=list)  # questions, or the rest of them, beyond the context


def measure(
    generators: Mapping[str, TextGenerator],
    questions: Sequence[Question],
    tokenizer: Any,
    context_length: int,
    sampling: Sampling,
    rounds: int,
    on_progress: Callable[[str], None],
) -> LatencyOutcome:
    """Warm all up, then ask every question. `generators` holds PLAIN. Raises ForedraftError where one fails."""
    brief = replace(sampling, max_tokens=min(WARM_UP_TOKENS, sampling.max_tokens), min_tokens=0)
    first = tokenizer(questions[0].turns[0]).input_ids
    for name, generator in generators.items():
        on_progress(f"warming up {name}")
        _time_generation(name, generator, first[: max(1, context_length - brief.max_tokens)], brief)
    names, outcome = list(generators), LatencyOutcome({name: [] for name in generators})
    for number, question in enumerate(questions):
        conversation = PromptBuilder(tokenizer)
        for turn, text in enumerate(question.turns):
            prompt = conversation.add_user_turn(text)
            if len(prompt) + sampling.max_tokens > context_length:
                outcome.too_long.append(question.name)
                break
            seen: dict[str, list[tuple[Completion, float]]] = {name: [] for name in names}
            for repeat in range(rounds):
                shift = (number + turn + repeat) % len(names)
                for name in names[shift:] + names[:shift]:
                    on_progress(name)
                    seen[name].append(_time_generation(name, generators[name], prompt, sampling))
            for name, pairs in seen.items():
                completions, times = zip(*pairs, strict=True)
                outcome.runs[name].append(PromptRun(completions, times, question.category))
            answer = outcome.runs[PLAIN][-1].completions[0]
            conversation.add_answer(answer.token_ids, answer.text)
    return outcome


def _time_generation(
    name: str, generator: TextGenerator, prompt: list[int], sampling: Sampling
) -> tuple[Completion, float]:
    began = time.perf_counter()
    (completion,) = generator.generate([prompt], sampling)
    seconds = time.perf_counter() - began
    if completion.error is not None:
        raise ForedraftError(f"{name} failed: {completion.error}")
    return completion, seconds


def build_rows(outcome: LatencyOutcome, sampling: Sampling) -> list[LatencyRow]:
    """The table, plain decoding first. Raises ForedraftError where nothing was run."""
    plain = outcome.runs[PLAIN]
    if not plain:
        raise ForedraftError("no prompt fits the model's context with --max-tokens; ask for fewer tokens")
    return [_build_row(name, runs, plain, sampling) for name, runs in outcome.runs.items()]


def build_category_rows(outcome: LatencyOutcome, sampling: Sampling) -> dict[str, list[LatencyRow]]:
    """The same table for every category of the questions, in their order; none if the questions have none."""
    names = dict.fromkeys(run.category for run in outcome.runs[PLAIN] if run.category)
    parts = {
        name: LatencyOutcome(
            {method: [run for run in runs if run.category == name] for method, runs in outcome.runs.items()}
        )
        for name in names
    }
    return {name: build_rows(part, sampling) for name, part in parts.items()}


def _build_row(name: str, runs: Sequence[PromptRun], plain: Sequence[PromptRun], sampling: Sampling) -> LatencyRow:
    stats: Stats = sum_stats(completion.stats for run in runs for completion in run.completions)
    tokens, seconds = sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)
    rule = runs[0].completions[0].verification
    is_determined = sampling.is_greedy or (sampling.seed is not None and rule == "match")
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
        identical=sum(run.tokens == base.tokens for run, base in pairs) if is_determined else None,
        prompts=len(runs),
        num_tokens=tokens,
        seconds=seconds,
        verification=rule,
    )


def _compute_token_seconds(run: PromptRun) -> float:
    """Seconds for a token: texts that end by themselves may differ in length."""
    return run.seconds / max(1, len(run.tokens))
