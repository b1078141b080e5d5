"""Declaration of the needs and abilities of a drafter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from foredraft.drafters.failure_backoff import FailureBackoff
from foredraft.kv.draft_kv import DraftKV
from foredraft.models.hf import HFModel

# What commits without hidden states do to a request (`DrafterSpec.missed_states`).
MissedStates = Literal["forbidden", "end", "pause"]
MISSED_STATES = get_args(MissedStates)
# Steps after which a drafter reads the target's tokens (`DrafterSpec.token_steps`).
TokenSteps = Literal["all", "active", "drafted"]
TOKEN_STEPS = get_args(TokenSteps)
SAME_VOCABULARY = "same"  # `DrafterSpec.vocabulary` of a drafter that reads the target's tokens


def _do_nothing() -> None:
    """Default of `DrafterSpec.silence_mismatch`."""


@dataclass(frozen=True)
class DrafterSpec:
    """Needs and abilities of a drafter.

    A drafter with other needs than before returns another object. It returns the same object while nothing changed,
    because the engine reads the spec several times per step and checks every new object.

    Attributes:
        max_nodes: maximum number of draft nodes per request and step. The scheduler grants at most this many.
        hidden_layers: layer boundaries of the target whose hidden states are in `Commit.features`. 0 is the output of
            the embedding, n the output of the n-th layer, and AFTER_FINAL_NORM (-1) the input of the output matrix
            (lm_head). The states of several boundaries are concatenated along the last dimension. Default () = none.
        needs_target_argmax: True requests `Commit.target_argmax`: the target's likeliest token after every scored node
            of the verified tree, rejected nodes included. Default False.
        num_target_candidates: k > 0 requests `Commit.target_candidates`: the target's k likeliest tokens after every
            scored node of the verified tree, rejected nodes included. Default 0 = none.
        draft_kv: KV cache of the drafter: tensors of its own, addressed by the target's page ids. Default None.
        decides_length: True if the drafter itself weighs the gain of a draft against its cost. `LLM` then uses
            `LossBudgetPolicy` (`loss_budget.py`) for adaptive lengths. Default False.
        shares_target_kv: True if the drafter reads the target's KV pool. It may write there only behind the committed
            tokens, where the verifying pass writes again. This is not checked. Default False.
        attach: function that gives the target to a drafter with `shares_target_kv`. `LLM` calls it once, before
            the first step. It raises ForedraftError for a target that the drafter cannot use. Default None.
        reads_commits: False if `observe` does nothing; it is then not called. Default True.
        reads_plain_commits: False if `observe` does nothing after a step in which no request was granted a draft; it is
            then not called after such steps, which are all steps while drafting rests. Default True.
        is_token_source: True if the drafter is a `TokenDraftSource`, for ensembles. Default False.
        samples_drafts: True if a token source samples the drafts of requests that sample, which takes time. An
            ensemble makes such a draft only if it selects it. Default False.
        is_chain: True if every draft is a chain, under every rule. The rule `auto` then verifies by `block` where it
            pays. Default False.
        title: name in logs and reports. Default None = the name of the method.
        silence_mismatch: function that turns off the warning of a drafter that was trained for another target. Training
            calls it. Default: there is no such warning.
        vocabulary: how the drafter translates, as the option `vocab` names it; "same" if it reads the target's tokens.
            For reports. Default "same".
        is_native: whether its network runs as native CPU code, for reports; None = it has no network. Default None.
        member_backoffs: failure counts and quarantines of the drafters inside a wrapper or an ensemble, if each of them
            has a sandbox of its own. Default () = no drafter inside has one.
        missed_states: what missing hidden states do to a request. "forbidden" (default): every step has them. The
            engine may leave them out while no request drafts if it is "end", and the request never drafts again, or
            "pause". A drafter with "pause" reads the newest state alone, that of the token before the last committed
            one, so it drafts after the next step with states. Other states of a prompt may be zeros.
        token_steps: steps after which `observe` reads the target's tokens (`needs_target_argmax`,
            `num_target_candidates`): "all" (default), "active" = all in which drafting does not rest, or "drafted" =
            those in which a request was granted a draft.
    """

    max_nodes: int
    hidden_layers: tuple[int, ...] = ()
    needs_target_argmax: bool = False
    num_target_candidates: int = 0
    draft_kv: DraftKV | None = None
    decides_length: bool = False
    shares_target_kv: bool = False
    attach: Callable[[HFModel], None] | None = None
    reads_commits: bool = True
    reads_plain_commits: bool = True
    is_token_source: bool = False
    samples_drafts: bool = False
    is_chain: bool = False
    title: str | None = None
    silence_mismatch: Callable[[], None] = _do_nothing
    vocabulary: str = SAME_VOCABULARY
    is_native: bool | None = None
    member_backoffs: tuple[FailureBackoff, ...] = ()
    missed_states: MissedStates = "forbidden"
    token_steps: TokenSteps = "all"

    @property
    def needs_tokens(self) -> bool:
        """Whether `observe` reads tokens of the target after the scored nodes."""
        return self.needs_target_argmax or self.num_target_candidates > 0


NO_DRAFT_SPEC = DrafterSpec(max_nodes=0, reads_commits=False)


def combine_token_steps(specs: Sequence[DrafterSpec]) -> TokenSteps:
    """Return the steps whose tokens some of these drafters reads; "all" if none reads tokens."""
    found = {spec.token_steps for spec in specs if spec.needs_tokens}
    return next((steps for steps in TOKEN_STEPS if steps in found), "all")
