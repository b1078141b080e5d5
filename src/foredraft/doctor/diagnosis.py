"""A diagnosis: facts, measurements, predictions, warnings and the verdict."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.doctor.candidate import Candidate
from foredraft.doctor.examination import DrafterResult
from foredraft.doctor.facts import DrafterFacts, MachineFacts, TargetFacts, to_json
from foredraft.doctor.findings import Finding, pays
from foredraft.doctor.prediction import StreamPrediction
from foredraft.doctor.speed_check import CheckedSpeed


@dataclass(frozen=True)
class DrafterDiagnosis:
    """One drafter that was measured."""

    candidate: Candidate
    facts: DrafterFacts
    result: DrafterResult
    checks: tuple[CheckedSpeed, ...] = ()  # measured speed, by number of streams; () = not checked

    @property
    def mean_speed_up(self) -> float:
        """Geometric mean of the speed-ups over the numbers of streams, without those at which it is left off."""
        return statistics.geometric_mean(max(1.0, prediction.speed_up) for prediction in self.result.predictions)

    @property
    def pays(self) -> bool:
        return any(map(pays, self.result.predictions))


@dataclass(frozen=True)
class Verdict:
    """The recommendation; without `drafter`, plain decoding."""

    drafter: DrafterDiagnosis | None
    lengths: Mapping[int, int] = field(default_factory=dict)  # best draft length by number of streams; 0 = none

    @property
    def spec_tokens(self) -> str:
        """Value of --spec-tokens: the best length if it is the same for all numbers of streams, else auto."""
        lengths = set(self.lengths.values())
        return str(lengths.pop()) if len(lengths) == 1 else "auto"


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `foredraft doctor` reports.

    Attributes:
        machine: the machine.
        target: the target.
        drafters: drafters that were measured.
        unfit: reason why a drafter could not be used, by label.
        points: (rows, seconds) of the target's pass.
        plain_seconds: seconds of a step of plain decoding, by number of streams.
        findings: warnings.
        are_given: the user gave the drafters.
        output_tokens: mean tokens of an output.
    """

    machine: MachineFacts
    target: TargetFacts
    drafters: tuple[DrafterDiagnosis, ...]
    unfit: Mapping[str, str]
    points: Sequence[tuple[int, float]]
    plain_seconds: Mapping[int, float]
    findings: tuple[Finding, ...]
    are_given: bool
    output_tokens: float

    @property
    def verdict(self) -> Verdict:
        """The drafter with the highest mean speed-up, if it saves time with any number of streams."""
        paying = [drafter for drafter in self.drafters if drafter.pays]
        if not paying:
            return Verdict(None)
        best = max(paying, key=lambda drafter: drafter.mean_speed_up)
        return Verdict(best, {p.num_streams: p.length if pays(p) else 0 for p in best.result.predictions})

    @property
    def has_unfit_drafter(self) -> bool:
        """Whether a drafter that the user gave does not fit, or cannot save time."""
        return self.are_given and (bool(self.unfit) or not all(drafter.pays for drafter in self.drafters))

    @property
    def host_seconds(self) -> float | None:
        """Seconds of a plain step of one request beside the target's pass; None if it was not measured."""
        single = dict(self.points).get(1)
        return None if single is None or 1 not in self.plain_seconds else max(self.plain_seconds[1] - single, 0.0)

    @property
    def json(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        verdict = self.verdict
        return {
            "machine": to_json(self.machine),
            "target": to_json(self.target),
            "drafters": [_describe_drafter(drafter) for drafter in self.drafters],
            "unfit": dict(self.unfit),
            "pass_seconds": [{"rows": rows, "seconds": seconds} for rows, seconds in self.points],
            "plain_step_seconds": {str(count): seconds for count, seconds in self.plain_seconds.items()},
            "host_seconds": self.host_seconds,
            "output_tokens": self.output_tokens,
            "warnings": [vars(finding) for finding in self.findings],
            "verdict": {
                "drafter": None if verdict.drafter is None else verdict.drafter.candidate.label,
                "lengths": {str(count): length for count, length in verdict.lengths.items()},
                "spec_tokens": verdict.spec_tokens if verdict.drafter else "0",
                "has_unfit_drafter": self.has_unfit_drafter,
            },
        }


def _describe_drafter(drafter: DrafterDiagnosis) -> dict[str, Any]:
    acceptance, checks = drafter.result.acceptance, {check.num_streams: check for check in drafter.checks}
    return {
        **to_json(drafter.facts),
        "acceptance": {
            "by_position": list(acceptance.survival),
            "draft_probability": list(acceptance.draft_probs),
            "drafts": acceptance.num_drafts,
            "first_accepted": acceptance.num_first_accepted,
        },
        "draft_seconds": {
            str(count): [
                costs.drafting.predict_draft(count, n, n * count) for n in range(1, len(acceptance.survival) + 1)
            ]
            for count, costs in drafter.result.costs.items()
        },
        "streams": [_describe_prediction(one, checks.get(one.num_streams)) for one in drafter.result.predictions],
    }


def _describe_prediction(prediction: StreamPrediction, check: CheckedSpeed | None) -> dict[str, Any]:
    measured = {} if check is None else {
        "measured_speed_up": check.speed_up,
        "measured_plain_tokens_per_second": check.plain_rate,
        "measured_tokens_per_second": check.rate,
        "error": prediction.speed_up / check.speed_up - 1.0,
    }  # fmt: skip
    return {
        "streams": prediction.num_streams,
        "best_length": prediction.length,
        "tokens_per_pass": prediction.tokens_per_pass,
        "plain_tokens_per_second": prediction.plain_rate,
        "tokens_per_second": prediction.rate,
        "speed_up": prediction.speed_up,
        "speed_up_by_length": {str(length): speed_up for length, speed_up in prediction.by_length.items()},
        **measured,
    }
