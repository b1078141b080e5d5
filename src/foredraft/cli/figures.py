"""The figures of a run, summed over its completions, and the JSON they and the completions are printed as."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from foredraft.completion import Completion, Stats


def total(stats: Iterable[Stats]) -> Stats:
    """One Stats for many completions: every count and time is the sum, so every rate is the mean over all passes."""
    rows = list(stats)
    sums = {spec.name: sum(getattr(row, spec.name) for row in rows) for spec in _numbers()}
    accepted_at = tuple(sum(column) for column in zip_longest(*(row.accepted_at for row in rows), fillvalue=0))
    return Stats(**sums, accepted_at=accepted_at)


def _numbers() -> list[dataclasses.Field[Any]]:
    return [spec for spec in dataclasses.fields(Stats) if spec.name != "accepted_at"]


@dataclass(frozen=True)
class Figures:
    """One run: all its completions, and how long they took together on the clock of the caller."""

    stats: Stats
    seconds: float

    @classmethod
    def of(cls, completions: Sequence[Completion], seconds: float) -> "Figures":
        return cls(total(c.stats for c in completions), seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.stats.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def line(self) -> str:
        """The one line a person reads."""
        s = self.stats
        rate = f"{s.acceptance_rate:.2f}" if s.num_drafted else "-"
        return (
            f"{s.num_tokens} tokens in {self.seconds:.2f} s · {self.tokens_per_second:.1f} tokens/s · "
            f"acceptance length {s.acceptance_length:.2f} · acceptance rate {rate} · {s.target_passes} target passes"
        )


def completion_json(completion: Completion, lossy: frozenset[str]) -> dict[str, Any]:
    """The fixed shape; beyond it only what must not go unsaid: a lossy rule, an error."""
    stats = completion.stats
    names = ("acceptance_length", "acceptance_rate", "per_position", "target_passes", "draft_time", "wall_time")
    result: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "logprobs": completion.logprobs and [dataclasses.asdict(entry) for entry in completion.logprobs],
        "stats": {name: getattr(stats, name) for name in names},
    }
    if completion.verification in lossy:
        result["verification"] = completion.verification
    if completion.error is not None:
        result["error"] = completion.error
    return _finite(result)  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    """JSON has no infinity: the log of a probability of zero is null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
