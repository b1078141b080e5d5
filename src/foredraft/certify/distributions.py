"""Checks of the distribution of sampled requests, from many samples of a few prompts.

Each link between the draft and the output has a check of its own, because the sensitive ones are exact:

- drafts: counts of the draft trees against the q that the drafter states (chi-square);
- steps: the rule, integrated over its uniforms for every draft tree that occurred, weighted by q, against p (exact);
- target: p of drafting steps against plain decoding and the slow reference (exact, up to rounding);
- uniforms: those that the engine passes to the rule (chi-square, and none may occur twice);
- outputs: joint counts of the first tokens against the enumerated probabilities (chi-square).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foredraft.certify.recorder import StepRecord
from foredraft.certify.result import CheckResult
from foredraft.certify.samples import NUM_TOKENS, PromptSamples
from foredraft.certify.statistics import NO_TEST, ChiSquare, compare_counts
from foredraft.certify.subject import Subject
from foredraft.verification.rule import Rule

ALPHA = 1e-7  # probability of a false alarm of each test
BIAS_LIMIT = 1e-3  # total variation distance of a step: the integration itself stays below 7e-4
MIN_TARGET_LIMIT = 1e-5  # total variation distance that the arithmetic of p in float32 may make
NUM_CHAIN_NODES, NUM_TREE_NODES = 2, 3  # draft nodes: few, so that all outcomes occur
OUTPUTS = f"first {NUM_TOKENS} tokens"  # name of the check of outputs
NUM_BINS = 16  # of the uniforms


@dataclass(frozen=True)
class DistributionChecks:
    """Samples of a few prompts under one rule, and the checks on them."""

    subject: Subject
    rule: Rule
    samples: tuple[PromptSamples, ...]

    @classmethod
    def sample(cls, subject: Subject, rule: Rule, num_samples: int, num_prompts: int) -> "DistributionChecks":
        """Generate the samples; `num_samples` for each prompt."""
        spec = subject.spec
        num_nodes = min(spec.max_nodes, NUM_CHAIN_NODES if spec.is_chain or not rule.takes_trees else NUM_TREE_NODES)
        indices = range(min(num_prompts, len(subject.prompts)))
        samples = [PromptSamples.generate(subject, index, rule, num_samples, num_nodes) for index in indices]
        return cls(subject, rule, tuple(samples))

    def run(self) -> Iterator[CheckResult]:
        """Run the checks that apply to the rule, one after another."""
        yield self.check_outputs()
        yield self.check_target()
        if not self.rule.shares_noise:  # otherwise the draft and its acceptance depend on the same random numbers
            yield self.check_drafts()
            yield self.check_steps()
            yield self.check_uniforms()

    def check_outputs(self) -> CheckResult:
        """Test the joint distribution of the first tokens."""
        tests = [samples.compare_outputs(self.subject) for samples in self.samples]
        return self._judge_tests(OUTPUTS, tests, "outputs")

    def check_drafts(self) -> CheckResult:
        """Test that draft tokens have the distribution q that the drafter states."""
        tests = [group.compare_drafts() for samples in self.samples for group in samples.groups]
        return self._judge_tests("draft tokens", tests, "drafts")

    def _judge_tests(self, name: str, tests: Sequence[ChiSquare], unit: str) -> CheckResult:
        if not tests:
            return CheckResult(self._name(name), False, "no drafts of one kind occurred often enough to test them")
        joint = sum(tests, NO_TEST)
        if not joint.degrees and joint.statistic == 0:
            return CheckResult(self._name(name), True, f"no random {unit}: each has probability 1")
        bias, p_value = joint.find_detectable_bias(ALPHA), joint.p_value
        evidence = (
            f"{joint.num_samples:,} {unit}, p-value {p_value:.2g}; would have found a bias of {bias:.1%} with 99 %"
        )
        figures = {"samples": joint.num_samples, "p_value": p_value, "detectable_bias": bias}
        return CheckResult(self._name(name), p_value >= ALPHA, evidence, figures)

    def check_target(self) -> CheckResult:
        """Compare p of drafting steps with plain decoding."""
        largest = max(samples.measure_rounding(self.subject) for samples in self.samples)
        limit = max(self.subject.rounding_limit / 4, MIN_TARGET_LIMIT)
        evidence = (
            f"p of drafting steps differs from plain decoding by at most {largest:.1g} (rounding: up to {limit:g})"
        )
        return CheckResult(self._name("target"), largest <= limit, evidence, {"largest": largest, "limit": limit})

    def check_steps(self) -> CheckResult:
        """Integrate the rule over its uniforms, on the draft trees that occurred."""
        groups = [group for samples in self.samples for group in samples.groups]
        usable = [group for group in groups if group.is_complete]
        if not usable:
            masses = ", ".join(f"{group.probability:.3f}" for group in groups) or "none"
            evidence = f"no set of draft trees was complete (probabilities: {masses}); give more --samples"
            return CheckResult(self._name("steps"), False, evidence)
        measured = [group.measure_bias(self.rule) for group in usable]
        bias, impossible = max(bias for bias, _ in measured), max(mass for _, mass in measured)
        num_trees = sum(len(group.trees) for group in usable)
        unseen = max(1 - group.probability for group in usable)
        evidence = f"{num_trees} draft trees in {len(usable)} places, largest bias {bias:.2%} (limit {BIAS_LIMIT:.1%})"
        if impossible:
            evidence += f"; tokens that the target cannot produce: {impossible:.2g}"
        return CheckResult(
            self._name("steps"),
            bias <= BIAS_LIMIT and impossible == 0,
            evidence,
            {"trees": num_trees, "bias": bias, "limit": BIAS_LIMIT, "impossible": impossible, "unseen": unseen},
        )

    def check_uniforms(self) -> CheckResult:
        """Test the uniforms of the steps: evenly spread, independent of each other and of the draft, used once."""
        records = [record for samples in self.samples[:1] for record in samples.records if record.num_drafted]
        values = np.array([u for record in records for u in record.uniforms])
        repeated = len(values) - len(np.unique(values))
        spread = compare_counts(np.histogram(values, NUM_BINS, (0, 1))[0], np.full(NUM_BINS, 1 / NUM_BINS))
        pairs = _count_pairs(records)
        tests = [spread, compare_counts(pairs, np.full(len(pairs), 1 / len(pairs)))]
        p_value = sum([*tests, *_test_acceptance(records)], NO_TEST).p_value
        outside = int(((values <= 0) | (values >= 1)).sum())
        is_passed = bool(len(values)) and p_value >= ALPHA and not repeated and not outside
        evidence = f"{len(values):,} uniforms of {len(records):,} steps, p-value {p_value:.2g}"
        evidence += f"; {repeated} repeated" if repeated else "; none repeated"
        evidence += f"; {outside} outside (0, 1)" if outside else ""
        return CheckResult(self._name("uniforms"), is_passed, evidence, {"uniforms": len(values), "repeated": repeated})

    def _name(self, name: str) -> str:
        return f"{name} ({self.rule.name})"


def _test_acceptance(records: Sequence[StepRecord]) -> Iterator[ChiSquare]:
    """Test for every first draft token that the uniform which decides on it is evenly spread."""
    quarters: dict[int, list[int]] = defaultdict(lambda: [0] * 4)
    for record in records:
        quarters[record.tree.tokens[1]][min(int(4 * record.uniforms[0]), 3)] += 1
    for counts in quarters.values():
        yield compare_counts(counts, [0.25] * 4)


def _count_pairs(records: Sequence[StepRecord]) -> list[int]:
    """Count in which quarters the first and the last uniform of each step lie: 16 cells."""
    cells = [0] * 16
    for record in records:
        first, last = (min(int(4 * u), 3) for u in (record.uniforms[0], record.uniforms[-1]))
        cells[4 * first + last] += 1
    return cells
