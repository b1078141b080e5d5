"""Simulated drafter: chains of a request's own prompt tokens, of which a given share is accepted.

No draft model is needed. `foredraft.simulation:METHOD` is its method. It is in no folder of `drafters`: these are the
methods whose output is the target's. docs/how-to/measure-speed.md shows its use.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.spec import DrafterSpec
from foredraft.errors import ForedraftError
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree
from foredraft.verification.rule import Rule
from foredraft.verification.simulated import make_simulated_rule

METHOD_PATH = "foredraft.simulation:METHOD"  # the method's name, as in `--spec-method`
RATE_OPTION = "acceptance_rate"
MAX_COST_MS = 10_000.0
TITLE = "simulated"


@dataclass(frozen=True)
class SimulationConfig:
    """Options of the simulated drafter.

    Attributes:
        acceptance_rate: probability that a draft token is accepted if all tokens before it were, in [0, 1]. It must be
            given.
        cost_ms: milliseconds of one pass of the drafter, which adds one token to every draft of the step. Default 0.
    """

    acceptance_rate: float | None = None
    cost_ms: float = 0.0


class SimulatedDrafter:
    """Drafter of chains of the longest granted length. It waits for the time that a drafter's own passes would take.

    A draft repeats the tokens of the prompt in order, without control tokens and end ids, so that an accepted token
    ends no output.

    Args:
        num_speculative_tokens: K, the length of a draft.
        seconds_per_pass: duration of one pass; a step has as many passes as its longest draft has tokens.
        control_ids: ids of control tokens.
        wait: function that waits for a number of seconds. Default: `time.sleep`.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        seconds_per_pass: float = 0.0,
        control_ids: frozenset[int] = frozenset(),
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.seconds_per_pass = seconds_per_pass
        self.spec = DrafterSpec(num_speculative_tokens, reads_commits=False, is_chain=True, title=TITLE)
        self._control_ids = control_ids
        self._wait = wait
        self._cycles: dict[int, tuple[int, ...]] = {}  # by slot: the tokens that the drafts repeat

    def propose(self, batch: Batch) -> TokenTree:
        """Draft for every request that may draft, and wait for the passes; see `Drafter.propose`."""
        drafts = {b: self._draft(batch.requests[b], batch.granted_nodes[b]) for b in batch.find_drafting()}
        num_passes = max((len(draft.tokens) for draft in drafts.values()), default=0)
        if self.seconds_per_pass and num_passes:
            self._wait(self.seconds_per_pass * num_passes)
        return to_token_tree(batch, drafts)

    def _draft(self, request: Request, budget: int) -> Draft:
        cycle = self._cycles.get(request.slot)
        if cycle is None:
            cycle = self._cycles[request.slot] = self._select_tokens(request)
        length = max(0, min(self.num_speculative_tokens, budget, request.max_draft_depth))
        start = request.num_tokens
        return Draft.from_chain([cycle[i % len(cycle)] for i in range(start, start + length)])

    def _select_tokens(self, request: Request) -> tuple[int, ...]:
        excluded = self._control_ids | request.spec.end_ids | request.spec.eos_ids
        tokens = tuple(token for token in request.spec.input_tokens if token not in excluded)
        return tokens or (next(token for token in range(len(excluded) + 1) if token not in excluded),)

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Do nothing: a draft depends on no committed token."""

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._cycles.pop(slot, None)


def make_rule(config: SimulationConfig) -> Rule:
    """Return the rule of the drafts. Raises ForedraftError for a rate that is missing or out of range."""
    if config.acceptance_rate is None:
        raise ForedraftError(f"the simulated drafter needs {RATE_OPTION}, from 0 to 1, such as {RATE_OPTION}=0.8")
    return make_simulated_rule(config.acceptance_rate)


def create(config: SimulationConfig, context: DrafterContext) -> SimulatedDrafter:
    """Make the drafter. Raises ForedraftError for an option that is missing or out of range."""
    make_rule(config)
    if not 0 <= config.cost_ms <= MAX_COST_MS:
        raise ForedraftError(f"cost_ms must lie in 0..{MAX_COST_MS:.0f} milliseconds, got {config.cost_ms}")
    added = getattr(context.tokenizer, "added_tokens_decoder", {})
    control_ids = frozenset(int(i) for i, token in added.items() if getattr(token, "special", True))
    return SimulatedDrafter(context.num_speculative_tokens, config.cost_ms / 1000, control_ids)


METHOD = Method(name=TITLE, config=SimulationConfig, create=create, uses_model=False, make_rule=make_rule)


def simulate_acceptance(acceptance_rate: float, cost_ms: float = 0.0) -> dict[str, Any]:
    """Return a drafter for `LLM(drafter=...)` whose drafts are accepted at a given rate, for load tests.

    The output is simulated: it is not the target's. Its `Completion.verification` is "simulated".

    Example:
        >>> llm = LLM(drafter=simulate_acceptance(0.8, cost_ms=2), num_speculative_tokens=4)

    Args:
        acceptance_rate: probability that a draft token is accepted if all tokens before it were, in [0, 1].
        cost_ms: milliseconds of one pass of the drafter, which adds one token to every draft of a step. Default 0.

    Raises:
        ForedraftError: the rate is out of range.
    """
    make_simulated_rule(acceptance_rate)
    return {"method": METHOD_PATH, RATE_OPTION: acceptance_rate, "cost_ms": cost_ms}
