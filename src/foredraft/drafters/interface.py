"""The interface of drafters: a spec, and propose, observe, forget.

A drafter is untrusted: the engine calls it through a sandbox (`engine/sandbox.py`), so a fault of a drafter costs
speed, not output. The sandbox cannot end a call that never returns, and does not guard the target's KV pool from a
drafter that shares it. docs/how-to/write-a-drafter.md is the tutorial; `tree.py` shows a token tree and a commit.
"""

from collections.abc import Sequence
from typing import Protocol

from foredraft.drafters.draft import Draft
from foredraft.drafters.spec import DrafterSpec
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


class Drafter(Protocol):
    """Source of token trees for the requests of a batch.

    A step calls `propose`, runs the forward pass of the target, and calls `observe`. Calls never overlap, but one call
    may come from another thread than the call before. Requests and commits are read-only for a drafter. It keys its own
    state by `Request.slot`, an index from 0 to max_batch - 1 that a request has while it runs. After `forget` another
    request may get the slot.

    `propose` is left out if no request may draft. `observe` is left out if `DrafterSpec.reads_commits` is False, and
    after a step without drafts if `DrafterSpec.reads_plain_commits` is False. If a step raises, `observe` is left out
    and `forget` is called for all slots. During a quarantine (after several faults of the drafter) only `forget` is
    called. After it, `Request.num_computed` exceeds the number of observed tokens, as after a prefix-cache hit.

    A drafter with KV on the target's pages declares it in `DrafterSpec.draft_kv`. Between two steps the engine may call
    `DraftKV.flush`, so that deferred entries are written.
    """

    @property
    def spec(self) -> DrafterSpec:
        """Needs of the drafter: draft nodes, hidden states, KV. It may be an attribute or a property."""

    def propose(self, batch: Batch) -> TokenTree:
        """Draft for the requests of a step, before the target's forward pass.

        Called only if at least one request may draft, that is if an entry of `batch.granted_nodes` is above 0.

        Returns:
            The trees of all requests. Node 0 of request b is `batch.get_root_token(b)`; at most
            `batch.granted_nodes[b]` draft nodes follow, none deeper than `Request.max_draft_depth`. A request without
            a draft has node 0 alone.
        """

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Read the result of a step, after verification.

        Called in every step, also if no request had a draft, and for prompt chunks; the class lists the exceptions. The
        requests do not have the new tokens yet: `Request.output` and `Request.num_computed` are those before the step.

        Args:
            batch: requests of the step, in the order of the commit.
            commit: path and tokens of every request, in the verified tree. That tree starts with all nodes of the
                chunk; the tree of `propose` starts at the last of them, which is the root if the chunk ends with the
                last committed token. `commit.features` [B, P, F] holds the hidden states at the nodes of the path: B
                requests, P the longest path, F the widths of all `hidden_layers` together. They are gathered on access:
                a drafter that reads them later notes them with `commit.path_features.keep(b)`.
        """

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots. Their requests ended, were aborted or preempted, or a step raised."""


NO_DRAFT = -1  # strength of a match that `TokenDraftSource.draft` makes no draft from


class TokenDraftSource(Protocol):
    """Additional methods of a drafter that reads token ids alone, no hidden states. TokenDrafter implements them.

    `DrafterSpec.is_token_source` declares them. They are for ensembles. An ensemble has several drafters, its members.
    In each step it takes the draft of one member, or merges several. For members with these methods it calls them in
    place of `propose`.
    """

    def draft(self, request: Request, budget: int) -> Draft:
        """Draft at most `budget` nodes for one request."""

    def match_strength(self, request: Request) -> int:
        """Return a measure of how reliable a draft after the last committed token is; 0 = unknown.

        For a copied draft it is the number of committed tokens that match before the copy. `NO_DRAFT` = `draft` would
        draft nothing. It must follow from the committed tokens, not from sampled draft tokens. An ensemble estimates
        the acceptance of a member separately for each value.
        """

    def continue_draft(self, request: Request, path: Sequence[int], budget: int) -> Draft:
        """Draft at most `budget` nodes below `path`: one or more draft tokens, here treated as if committed."""
