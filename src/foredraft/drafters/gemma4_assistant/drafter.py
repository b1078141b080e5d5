"""Gemma-4 assistants (Google, 2026): a small decoder whose layers read the target's keys and values.

The assistant has no KV cache: no prompt pass, no memory, nothing to roll back. A row reads the embedding of a token and
the state before it, so a tree costs one row per expanded node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from foredraft.drafters.common.last_hidden_state import LastHiddenStates, can_run_native, stack_states
from foredraft.drafters.common.level_loop import GrowingDraft, LevelStates, grow_levels, start_builder
from foredraft.drafters.common.mismatch_warning import MismatchDetector
from foredraft.drafters.common.tree_builder import NodeLogits, TreeSpec
from foredraft.drafters.draft import to_token_tree
from foredraft.drafters.gemma4_assistant.network import AssistantNetwork
from foredraft.drafters.gemma4_assistant.target_kv import FrozenRows, TargetKV
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.spec import DrafterSpec
from foredraft.errors import ForedraftError
from foredraft.kv.weak import bind_weakly
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


@dataclass
class AssistantDraft(GrowingDraft):
    """Growing draft of one request, with the state that its first row reads."""

    state: Tensor = field(kw_only=True)  # [B] of the token before the root

    @property
    def request(self) -> Request:
        return self.builder.request

    def list_frontier_tokens(self) -> list[int]:
        """Return the tokens of the frontier nodes; that of the root is the last committed token."""
        newest = self.request.num_tokens - 1
        return [
            self.builder.tokens[node - 1] if node else self.request.get_token(newest) for node in self.builder.frontier
        ]


class Gemma4Assistant:
    """Drafter that runs an assistant, one pass per level for all requests of a batch.

    It reads the target's KV pages. An engine must call `attach` before the first step.

    Args:
        network: assistant, on the device and in the dtype of the context.
        target: target, whose embedding and pages are read.
        target_layers: layer of the target that each layer of the network reads.
        tree_spec: limits and shape of the draft.
        context: target, device and vocabulary.
    """

    def __init__(
        self,
        network: AssistantNetwork,
        target: HFModel,
        target_layers: tuple[int, ...],
        tree_spec: TreeSpec,
        context: DrafterContext,
    ) -> None:
        self.network = network
        self.target = target
        self.target_kv = TargetKV(target.pool, target_layers, network.shape)
        self.tree_spec = tree_spec
        self.mismatch_detector = MismatchDetector(context)
        self._states = LastHiddenStates()
        self._is_attached = False
        self.spec = DrafterSpec(
            tree_spec.max_nodes,
            (AFTER_FINAL_NORM,),
            missed_states="pause",  # a draft needs the newest state alone
            shares_target_kv=True,
            attach=bind_weakly(self.attach),
            is_chain=tree_spec.is_chain,
            silence_mismatch=self.mismatch_detector.silence,
            is_native=can_run_native(context),
        )

    def attach(self, target: HFModel) -> None:
        """Set the target whose KV pages the drafter reads. `LLM` calls it once.

        Raises:
            ForedraftError: for another model, or for the target of a second LLM, whose KV pages are different.
        """
        if target.model is not self.target.model:
            raise ForedraftError(f"this assistant reads the keys of {self.target.name}; make one for {target.name}")
        if target.pool is not self.target.pool:
            if self._is_attached:
                raise ForedraftError("this assistant reads the KV pages of another engine; make one for each engine")
            self.target = target
            self.target_kv = TargetKV(target.pool, self.target_kv.layers, self.network.shape)
        self._is_attached = True

    def propose(self, batch: Batch) -> TokenTree:
        drafts = {b: draft for b in batch.find_drafting() if (draft := self._start_draft(batch, b)) is not None}
        if drafts:
            self._grow_drafts(list(drafts.values()), batch.page_size)
        tree = to_token_tree(batch, {b: draft.to_draft() for b, draft in drafts.items()})
        self.mismatch_detector.record_proposal(batch, tree)
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.mismatch_detector.record_commit(batch, commit)
        self._states.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        self._states.forget(slots)

    def _start_draft(self, batch: Batch, b: int) -> AssistantDraft | None:
        """Start the draft of request b; None without room, or without the target's state before the last token."""
        request = batch.requests[b]
        state = self._states.get(request)
        if state is None or request.num_computed != request.num_tokens - 1:
            return None
        builder = start_builder(self.tree_spec, batch, b, self.tree_spec.max_depth)
        return None if builder is None else AssistantDraft(builder, state=state)

    @torch.inference_mode()
    def _grow_drafts(self, drafts: list[AssistantDraft], page_size: int) -> None:
        """Grow all drafts to their end."""
        states = LevelStates(stack_states([draft.state for draft in drafts]))
        states.start(drafts)
        compute = partial(self._compute_level, states, page_size)
        grow_levels(drafts, compute(drafts), compute)

    def _compute_level(self, states: LevelStates, page_size: int, drafts: Sequence[AssistantDraft]) -> NodeLogits:
        """Run the network over the frontiers."""
        counts = [len(draft.builder.frontier) for draft in drafts]
        rows = FrozenRows.build([draft.request for draft in drafts], counts, page_size, self.target.device)
        tokens = [token for draft in drafts for token in draft.list_frontier_tokens()]
        hidden = self.network(
            self.embed(tokens), states.select_parents(drafts), rows.positions, partial(self.target_kv.attend, rows)
        )
        states.record(drafts, self.network.post_projection(hidden))
        return NodeLogits(self.network.compute_logits(hidden), self.target.vocab_size)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Return the embeddings [R, B] of tokens, scaled as the target's first layer reads them."""
        ids = torch.tensor(tokens, device=self.target.device)
        embeddings: Tensor = self.target.model.get_input_embeddings()(ids)
        return embeddings.to(self.network.pre_projection.weight.dtype)
