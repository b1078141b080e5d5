"""Certificate of a pair: the checks that were run on a target and its drafter, and whether they passed."""

import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import transformers

import foredraft
from foredraft.certify.distributions import OUTPUTS, DistributionChecks
from foredraft.certify.extremes import check_extremes
from foredraft.certify.outputs import check_outputs
from foredraft.certify.parameters import check_parameters
from foredraft.certify.result import CheckResult
from foredraft.certify.rule_check import check_rule
from foredraft.certify.subject import Subject
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.verification.rules import MATCH

NUM_SAMPLED_PROMPTS = 2


@dataclass(frozen=True)
class CertifyPlan:
    """Plan of a certificate.

    Args:
        prompts: texts on which the drafter drafts.
        max_tokens: tokens of every whole output. Default 48.
        num_samples: samples of each of two prompts, for each rule. Default 2,000.
        drafter_files: folders or hub ids of the drafter, to be named in the certificate. Default none.
    """

    prompts: tuple[str, ...]
    max_tokens: int = 48
    num_samples: int = 2000
    drafter_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Certificate:
    """Result of all checks.

    Attributes:
        conditions: what was checked, by name: model, drafter, rules, dtype, device, versions.
        results: one per check.
        seconds: duration.
    """

    conditions: dict[str, str]
    results: tuple[CheckResult, ...]
    seconds: float

    @property
    def is_passed(self) -> bool:
        """Whether every check passed."""
        return all(result.is_passed for result in self.results)

    @property
    def verdict(self) -> str:
        """One sentence: passed or not, and what would have been found."""
        failed = [result.name for result in self.results if not result.is_passed]
        if failed:
            return f"FAILED: {', '.join(failed)}"
        parts = []
        if limits := [r.figures["limit"] for r in self.results if "bias" in r.figures]:
            parts.append(f"a bias of {max(limits):.2%} in a step would have been found")
        tests = [r.figures for r in self.results if r.name.startswith(OUTPUTS)]
        if biases := [figures["detectable_bias"] for figures in tests if "detectable_bias" in figures]:
            parts.append(f"a bias of {max(biases):.1%} in whole outputs would have been found with 99 %")
        return "PASSED: " + ", ".join(parts)

    @property
    def json(self) -> str:
        """The certificate as a JSON object."""
        checks = [
            {"name": r.name, "passed": r.is_passed, "evidence": r.evidence, "figures": dict(r.figures)}
            for r in self.results
        ]
        values = {
            "passed": self.is_passed,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 1),
            **self.conditions,
            "checks": checks,
        }
        return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def certify(llm: LLM, plan: CertifyPlan, report: Callable[[str], None] = lambda _: None) -> Certificate:
    """Check that an LLM with a drafter produces what its target alone would produce.

    Args:
        llm: target with a drafter; it must have no other requests.
        plan: what to check.
        report: called with the name of each part before it begins. Default: nothing.

    Raises:
        ForedraftError: the LLM has no drafter, or there is no prompt.
    """
    if llm.drafter is None:
        raise ForedraftError("certify compares drafting with plain decoding; name a drafter")
    if not plan.prompts:
        raise ForedraftError("certify needs at least one prompt")
    start = time.perf_counter()
    subject = Subject.make(llm, plan.prompts)
    results = tuple(iterate_checks(subject, plan, report))
    return Certificate(_describe(subject, plan), results, time.perf_counter() - start)


def iterate_checks(subject: Subject, plan: CertifyPlan, report: Callable[[str], None]) -> Iterator[CheckResult]:
    """Run the checks one after another; arguments as for `certify`."""
    report("whole outputs")
    yield from check_outputs(subject, plan.max_tokens)
    report("sampling parameters")
    yield check_parameters(subject)
    for rule in (subject.rule,) if subject.rule.shares_noise else (subject.rule, MATCH):
        report(f"samples by {rule.name}")
        yield check_extremes(rule)
        if not rule.shares_noise:
            yield check_rule(rule)
        yield from DistributionChecks.sample(subject, rule, plan.num_samples, NUM_SAMPLED_PROMPTS).run()


def _describe(subject: Subject, plan: CertifyPlan) -> dict[str, str]:
    target = subject.plain.target
    kind = "native" if target.fused is not None else "exact" * target.has_exact_modules or "PyTorch modules"
    return {
        "model": subject.plain.builtin or target.name,
        "drafter": " ".join([subject.drafting.drafter_name, *plan.drafter_files]),
        "rules": f"match for greedy and seeded requests, {subject.rule.name} for others",
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "device": str(target.device),
        "computation": kind,
        "versions": f"foredraft {foredraft.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}",
    }
