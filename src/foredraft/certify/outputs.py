"""Check of whole outputs: equal with and without drafts, alone and in a batch, with their log-probabilities.

If a pass over several tokens rounds differently from a pass over one, two tokens of nearly equal score may change
places. Such a near tie is counted apart. Its margin is compared with the rounding that was measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.certify.result import CheckResult
from foredraft.certify.subject import EncodedPrompt, Subject
from foredraft.outputs import Completion
from foredraft.request_options import RequestOptions
from foredraft.sampling import rng
from foredraft.sampling.params import Sampling
from foredraft.sampling.rng import NoiseStream
from foredraft.verification.rule import Rule

ROUNDING_FACTOR = 4.0  # a margin below this many times the measured rounding is a near tie


@dataclass(frozen=True)
class OutputComparison:
    """Two outputs that should be equal.

    Attributes:
        num_equal: leading tokens that are equal.
        rounding: largest difference of a raw log-probability of these tokens, in nats.
        logprob_error: the same of the log-probability after the sampling settings.
        margin: by how much the expected token wins where the outputs part, in nats; None if they are equal.
    """

    num_equal: int
    rounding: float
    logprob_error: float
    margin: float | None


@dataclass(frozen=True)
class OutputRun:
    """One prompt with its sampling parameters and its output of plain decoding."""

    prompt: EncodedPrompt
    sampling: Sampling
    expected: Completion

    def draft(self, subject: Subject) -> Completion:
        """Generate the output with drafts, alone."""
        return subject.draft([self.prompt], self.sampling, rules=get_rule(self.sampling, subject))[0]

    def compare(self, found: Completion, subject: Subject) -> OutputComparison:
        """Compare with another output of the same request."""
        pairs = list(zip(self.expected.token_ids, found.token_ids, strict=False))
        num_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        entries = list(zip(self.expected.logprobs or (), found.logprobs or (), strict=False))[:num_equal]
        is_equal = self.expected.token_ids == found.token_ids
        margin = None
        if not is_equal:
            is_prefix = num_equal == len(pairs)
            margin = math.inf if is_prefix else self._measure_margin(subject, *pairs[num_equal], num_equal)
        return OutputComparison(
            num_equal,
            max((abs(a.raw_logprob - b.raw_logprob) for a, b in entries), default=0.0),
            max((abs(a.logprob - b.logprob) for a, b in entries), default=0.0),
            margin,
        )

    def _measure_margin(self, subject: Subject, expected: int, found: int, index: int) -> float:
        """Measure by how much the expected token wins against another at an index of the output."""
        output = self.expected.token_ids[:index]
        logits = subject.read_logits(self.prompt, output)
        if self.sampling.is_greedy:
            return float(logits[expected] - logits[found])
        position = len(self.expected.prompt_token_ids) + index
        key = rng.derive_key(self.sampling.seed or 0, 0, NoiseStream.TOKEN, position)
        scores = [self._score(logits, key, token) for token in (expected, found)]
        return scores[0] - scores[1]

    def _score(self, logits: np.ndarray, key: int, token: int) -> float:
        u = rng.uniform_matrix(torch.tensor([key]), len(logits))[0, token].item()
        return float(logits[token]) / self.sampling.temperature - math.log(-math.log(u))


def check_outputs(subject: Subject, max_tokens: int) -> list[CheckResult]:
    """Compare outputs with and without drafts: greedy, seeded, in batches, with another draft length.

    Args:
        subject: pair under test.
        max_tokens: length of every output.
    """
    greedy = [Sampling(temperature=0.0, max_tokens=max_tokens, logprobs=0) for _ in subject.prompts]
    seeded = [Sampling(temperature=1.0, seed=i, max_tokens=max_tokens, logprobs=0) for i in range(len(subject.prompts))]
    runs = {"greedy outputs": _decode_plainly(subject, greedy), "seeded outputs": _decode_plainly(subject, seeded)}
    alone = {name: [run.draft(subject) for run in several] for name, several in runs.items()}
    every_run = [run for several in runs.values() for run in several]
    prompts, samplings = [run.prompt for run in every_run], [run.sampling for run in every_run]
    rules = [get_rule(sampling, subject) for sampling in samplings]
    batches = [subject.draft(prompts, samplings, num_nodes, rules) for num_nodes in (None, 1)]
    comparisons = {
        name: [run.compare(found, subject) for run, found in zip(several, alone[name], strict=True)]
        for name, several in runs.items()
    }
    comparisons["batches and draft lengths"] = [
        run.compare(found, subject) for batch in batches for run, found in zip(every_run, batch, strict=True)
    ]
    rounding = max(c.rounding for several in comparisons.values() for c in several)
    drafted = {**alone, "batches and draft lengths": [c for batch in batches for c in batch]}
    results = [_judge(name, several, drafted[name], rounding) for name, several in comparisons.items()]
    return [*results, _judge_logprobs(comparisons, subject.rounding_limit)]


def get_rule(sampling: Sampling, subject: Subject) -> Rule | None:
    """Return the rule under which an output must equal plain decoding; None = that of the LLM."""
    return None if sampling.is_greedy else subject.seeded_rule


def _decode_plainly(subject: Subject, samplings: Sequence[Sampling]) -> list[OutputRun]:
    runs = []
    for prompt, sampling in zip(subject.prompts, samplings, strict=True):
        options = RequestOptions(verify=get_rule(sampling, subject))
        runs.append(OutputRun(prompt, sampling, subject.plain.generate([prompt], sampling, options=options)[0]))
    return runs


def _judge(
    name: str, comparisons: Sequence[OutputComparison], found: Sequence[Completion], rounding: float
) -> CheckResult:
    """Judge comparisons: every difference must be a near tie, and drafts must have been verified."""
    margins = [c.margin for c in comparisons if c.margin is not None]
    near = [margin for margin in margins if abs(margin) <= ROUNDING_FACTOR * rounding]
    num_drafted, num_accepted = sum(c.stats.num_drafted for c in found), sum(c.stats.num_accepted for c in found)
    faults = len(margins) - len(near)
    evidence = (
        f"{len(comparisons)} outputs, {sum(len(c.token_ids) for c in found):,} tokens, "
        f"{num_accepted:,} of {num_drafted:,} draft tokens accepted"
    )
    if margins:
        evidence += f"; {len(margins)} differ: {len(near)} at near ties, {faults} not explained by rounding"
        if faults:
            evidence += f" (margins up to {max(map(abs, margins)):.2g} nats, rounding {rounding:.2g})"
    else:
        evidence += "; all equal to plain decoding"
    if not num_drafted:
        evidence += "; no drafts were made, so nothing was tested: give prompts on which this drafter drafts"
    figures = {
        "outputs": len(comparisons),
        "draft_tokens": num_drafted,
        "accepted": num_accepted,
        "near_ties": len(near),
        "unexplained": faults,
        "margins": margins,
    }
    return CheckResult(name, not faults and num_drafted > 0, evidence, figures)


def _judge_logprobs(comparisons: dict[str, list[OutputComparison]], limit: float) -> CheckResult:
    several = [c for group in comparisons.values() for c in group]
    count = sum(c.num_equal for c in several)
    rounding, error = max(c.rounding for c in several), max(c.logprob_error for c in several)
    largest = max(rounding, error)
    evidence = (
        f"{count:,} tokens, all bit-equal to plain decoding"
        if largest == 0
        else f"{count:,} tokens, largest difference from plain decoding {largest:.2g} nats (rounding: up to {limit:g})"
    )
    figures = {"tokens": count, "raw_difference": rounding, "difference": error, "limit": limit}
    return CheckResult("log-probabilities", count > 0 and largest <= limit, evidence, figures)
