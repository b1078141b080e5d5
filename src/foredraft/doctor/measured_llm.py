"""An LLM whose engine has the measuring policy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foredraft.doctor.measuring_policy import MeasuringPolicy, list_lengths
from foredraft.drafters.user_spec import get_max_draft_length, parse_length_table
from foredraft.llm import LLM


@dataclass(frozen=True)
class MeasuredLLM:
    """An LLM, the policy of its engine, and the draft lengths that are compared; () = plain decoding."""

    llm: LLM
    policy: MeasuringPolicy
    lengths: tuple[int, ...] = ()

    @classmethod
    def make_plain(cls, llm: LLM) -> "MeasuredLLM":
        """Give the engine of plain decoding a measuring policy."""
        return cls._install(llm, ())

    @classmethod
    def make_drafting(cls, llm: LLM, spec: Mapping[str, Any]) -> "MeasuredLLM":
        """Make an engine with a drafter for the target of `llm`.

        Raises:
            ForedraftError: if the drafter cannot be used with this target.
        """
        drafting = llm.with_drafter(dict(spec))
        drafter = drafting.drafter
        assert drafter is not None
        drafter.spec.silence_mismatch()  # the report names a drafter of another target itself
        lengths = parse_length_table(dict(spec))
        longest = drafter.spec.max_nodes
        if lengths.most is None and drafter.spec.is_chain:
            longest = min(longest, get_max_draft_length(dict(spec)))
        is_fixed = lengths.is_fixed or drafter.spec.decides_length
        return cls._install(drafting, (longest,) if is_fixed else list_lengths(longest))

    def set_max_requests(self, count: int) -> None:
        """Set the most requests of a step; call it while there are none."""
        scheduler = self.llm.engine.scheduler
        scheduler.limits = replace(scheduler.limits, max_batch=count)

    @classmethod
    def _install(cls, llm: LLM, lengths: tuple[int, ...]) -> "MeasuredLLM":
        policy = MeasuringPolicy()
        llm.engine.length_policy = policy
        return cls(llm, policy, lengths)
