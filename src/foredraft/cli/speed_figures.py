"""Speed figures of a run, summed over its completions, and the JSON form of a completion."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foredraft.outputs import Completion, Stats, sum_stats

if TYPE_CHECKING:
    from foredraft.verification.rule import Rule


@dataclass(frozen=True)
class SpeedFigures:
    """Summed figures of the completions of a run, and its duration."""

    stats: Stats
    seconds: float  # wall time of the whole run, measured by the caller

    @classmethod
    def from_completions(cls, completions: Sequence[Completion], seconds: float) -> "SpeedFigures":
        return cls(sum_stats(c.stats for c in completions), seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.stats.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def summary(self) -> str:
        """One line with tokens, time, rate, acceptance and target passes."""
        s = self.stats
        rate = f"{s.acceptance_rate:.2f}" if s.num_drafted else "-"
        return (
            f"{s.num_tokens} tokens in {self.seconds:.2f} s · {self.tokens_per_second:.1f} tokens/s · "
            f"acceptance length {s.acceptance_length:.2f} · acceptance rate {rate} · {s.target_passes} target passes"
        )


def encode_completion(completion: Completion, rules: Mapping[str, "Rule"]) -> dict[str, Any]:
    """Return the JSON object of a completion.

    Its keys are fixed, except for `verification`, if the rule is lossy, and `error`, if the request failed.
    """
    stats = completion.stats
    names = ("acceptance_length", "acceptance_rate", "per_position", "target_passes", "draft_time", "wall_time")
    result: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "logprobs": completion.logprobs and [dataclasses.asdict(entry) for entry in completion.logprobs],
        "stats": {name: getattr(stats, name) for name in names},
    }
    rule = rules.get(completion.verification)
    if rule is None or not rule.is_lossless:  # a rule that is in no list simulates acceptance
        result["verification"] = completion.verification
    if completion.error is not None:
        result["error"] = completion.error
    return _replace_infinities(result)  # type: ignore[no-any-return]


def _replace_infinities(value: Any) -> Any:
    """Replace infinite and undefined numbers, such as the logarithm of 0, by None: JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _replace_infinities(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_infinities(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
