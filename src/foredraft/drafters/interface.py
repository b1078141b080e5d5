"""The interface of drafters: propose, observe, forget.

A drafter is untrusted. A fault in one costs speed, never output.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from foredraft.drafters.draft import Draft
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


@runtime_checkable
class Drafter(Protocol):
    """Source of token trees for the requests of a batch.

    The engine calls all three verbs on one thread. Requests and trees are read-only for a drafter; its own state is
    keyed by `Request.slot`. An optional attribute `needs_target_argmax = True` requests `Commit.target_argmax`: the
    target's likeliest token after every node of the tree, rejected nodes included.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layer boundaries of the target whose states appear in `Commit.features`; () = tokens only.

        0 is the embedding, n the output of layer n, AFTER_FINAL_NORM the state that the head reads.
        """

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes below a root. The scheduler reserves KV slots for them before every forward pass."""

    def propose(self, batch: Batch) -> TokenTree:
        """Draft for every request of a step, before the target's forward pass.

        Returns:
            A tree with one row of nodes per request. Node 0 is the last committed token; at most
            `batch.max_draft_nodes[b]` draft nodes follow. A request without a draft has node 0 alone.
        """

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Read the result of a step, after verification and before `Request.num_computed` advances.

        Called after every forward pass of the target, prompt chunks included. `commit.features` [B, P, F] holds the
        states at the accepted path for `hidden_layers`; it is valid during the call only.
        """

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of requests that ended, were aborted or were preempted."""


@runtime_checkable
class TextDraftSource(Protocol):
    """Interface of an ensemble member that needs only the committed tokens. TextDrafter implements it."""

    def draft(self, request: Request, budget: int) -> Draft:
        """Draft at most `budget` nodes for one request."""

    def match_strength(self, request: Request) -> int:
        """Return the evidence for the last draft of this request, such as the length of the match in tokens.

        It depends on committed tokens alone. Drafts of equal strength share one acceptance estimate; 0 = unknown.
        """

    def continue_draft(self, request: Request, path: Sequence[int], budget: int) -> Draft:
        """Draft at most `budget` nodes below the last token of `path` (one token or more), as if it were committed."""
