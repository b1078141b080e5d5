"""The interface of drafters: propose, observe, forget.

A drafter is untrusted: the engine calls it through a sandbox (`engine/sandbox.py`), so a fault of a drafter costs speed
and never output. docs/how-to/write-a-drafter.md is the tutorial; `tree.py` shows a token tree and a commit.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from foredraft.drafters.draft import Draft
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


@runtime_checkable
class Drafter(Protocol):
    """Source of token trees for the requests of a batch.

    A step calls `propose`, runs the forward pass of the target, and calls `observe`. `forget` may be called at any time
    between an `observe` and the next `propose`. All calls are on one thread. Requests and commits are read-only for a
    drafter. It keys its own state by `Request.slot`, the number of a running request, which is reused after `forget`.

    Optional attributes, with the value that counts if one is missing:
        needs_target_argmax: True requests `Commit.target_argmax`: the target's likeliest token after every node of the
            verified tree, rejected nodes included. Default False.
        draft_kv: `DraftKV` of a drafter with a KV cache on the target's page ids. Default None.
        decides_length: True if the drafter itself weighs the gain of a draft against its cost. Default False.
        attach: method called once with the target, for a drafter that uses the target's KV pool.
        shares_target_kv: True for such a drafter. Default False.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layer boundaries of the target whose hidden states `Commit.features` holds, concatenated; () = none.

        0 is the output of the embedding, n the output of the n-th layer, and AFTER_FINAL_NORM (-1) the input of the
        output matrix (lm_head).
        """

    @property
    def max_nodes(self) -> int:
        """Maximum number of draft nodes per request. The scheduler grants no more and reserves KV pages for them."""

    def propose(self, batch: Batch) -> TokenTree:
        """Draft for the requests of a step, before the target's forward pass.

        Called only if at least one request may draft, that is if an entry of `batch.max_draft_nodes` is above 0.

        Returns:
            The trees of all B requests. Node 0 of request b is `batch.get_root_token(b)`; at most
            `batch.max_draft_nodes[b]` draft nodes follow. A request without a draft has node 0 alone.
        """

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Read the result of a step, after verification.

        Called after every forward pass of the target, also if no request had a draft, and for prompt chunks. The
        requests do not have the new tokens yet: `Request.output` and `Request.num_computed` are those before the step.

        Args:
            batch: requests of the step, in the order of the commit.
            commit: accepted path and new tokens of every request. `commit.features` [B, P, F] holds the hidden states
                of `hidden_layers` at the nodes of the path. It is valid during the call only.
        """

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots. Their requests ended, were aborted or were preempted."""


@runtime_checkable
class TextDraftSource(Protocol):
    """Interface of an ensemble member that needs only the committed tokens. TextDrafter implements it.

    An ensemble drafts with several members and chooses or merges their drafts (`ensemble.py`).
    """

    def draft(self, request: Request, budget: int) -> Draft:
        """Draft at most `budget` nodes for one request."""

    def match_strength(self, request: Request) -> int:
        """Return a measure of how reliable the last draft of this request is; 0 = unknown.

        For drafts that are copied, it is the length of the match in tokens. It depends on committed tokens alone. An
        ensemble estimates the acceptance of a member separately for each value.
        """

    def continue_draft(self, request: Request, path: Sequence[int], budget: int) -> Draft:
        """Draft at most `budget` nodes below `path`: one or more draft tokens, here treated as if committed."""
