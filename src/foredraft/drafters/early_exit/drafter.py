"""Self-speculation: the target's first layers with its final norm and output matrix draft for the whole target.

Reference: LayerSkip, 2404.16710; Draft & Verify, 2309.08168.

The drafter has no KV cache. It reads the target's keys and values of its layers, and writes behind the committed
tokens, where the verifying pass writes again. So there is no prefill, no state per request, and a prefix-cache hit can
be drafted from at once. A target not trained for early exit often disagrees with its first layers; an adapter
(`foredraft train early_exit`) raises the acceptance rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.level_loop import grow_levels, start_builder
from foredraft.drafters.common.mismatch_warning import MismatchDetector
from foredraft.drafters.common.tree_builder import NodeLogits, TreeOptions, TreeSpec
from foredraft.drafters.draft import to_token_tree
from foredraft.drafters.early_exit.layer_selection import ExitLayerSelector
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.spec import DrafterSpec
from foredraft.errors import ForedraftError
from foredraft.kv.weak import bind_weakly
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel
from foredraft.models.truncated import Truncated
from foredraft.models.truncated_modules import Adapter
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


@dataclass(frozen=True)
class Config(TreeOptions):
    """Options: the tree options, and `exit_layer`.

    Args:
        exit_layer: number of target layers that draft; None = the adapter's, or without an adapter a measured choice.
    """

    exit_layer: int | None = None


class EarlyExit:
    """Drafter that runs the target's first layers, one forward pass per level for all requests of a batch.

    It reads and writes the target's own KV pages. An engine must call `attach` before the first step; a test without an
    engine must write the target's KV itself.
    """

    def __init__(
        self,
        target: HFModel,
        layer_selector: ExitLayerSelector,
        tree_spec: TreeSpec,
        context: DrafterContext,
        adapter: Adapter | None = None,
    ) -> None:
        self.target = target
        self.layer_selector = layer_selector
        self.tree_spec = tree_spec
        self.adapter = adapter
        self.mismatch_detector = MismatchDetector(context)
        if adapter is None:  # the target's own layers cannot belong to another target
            self.mismatch_detector.silence()
        self._truncated_targets: dict[int, Truncated] = {}
        self._is_attached = False
        self._get_truncated(layer_selector.layer)  # reports an invalid layer now and not at the first draft
        self.spec = DrafterSpec(
            tree_spec.max_nodes,
            layer_selector.hidden_layers,
            shares_target_kv=True,
            attach=bind_weakly(self.attach),
            reads_plain_commits=bool(layer_selector.hidden_layers),
            is_chain=tree_spec.is_chain,
            silence_mismatch=self.mismatch_detector.silence,
            is_native=target.fused is not None,
        )

    def attach(self, target: HFModel) -> None:
        """Set the target whose KV pages the drafter uses. `LLM` calls it once.

        Raises:
            ForedraftError: for another model, or for the target of a second LLM, whose KV pages are different.
        """
        if target.model is not self.target.model:
            raise ForedraftError(f"this early_exit drafter is made of {self.target.name}; make one for {target.name}")
        if target.pool is not self.target.pool:
            if self._is_attached:
                raise ForedraftError(
                    "this early_exit drafter uses the KV pages of another engine; make one for each engine"
                )
            self.target = target
            self._truncated_targets.clear()
        self._is_attached = True

    def propose(self, batch: Batch) -> TokenTree:
        drafts = {b: draft for b in batch.find_drafting() if (draft := self._start_draft(batch, b)) is not None}
        if drafts:
            self._build_trees(list(drafts.values()), batch.page_size)
        tree = to_token_tree(batch, {b: draft.builder.to_draft() for b, draft in drafts.items()})
        self.mismatch_detector.record_proposal(batch, tree)
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.mismatch_detector.record_commit(batch, commit)
        self.layer_selector.observe(batch, commit)
        layers = self.layer_selector.hidden_layers
        if layers != self.spec.hidden_layers:  # a measurement began or ended
            self.spec = replace(self.spec, hidden_layers=layers, reads_plain_commits=bool(layers))

    def forget(self, slots: Sequence[int]) -> None:
        """Do nothing: there is no state per request."""

    def _start_draft(self, batch: Batch, b: int) -> GrowingKVDraft | None:
        """Start a draft; None if the target has more to compute than the last token, as during a prompt."""
        request = batch.requests[b]
        if request.num_computed != request.num_tokens - 1:
            return None
        builder = start_builder(self.tree_spec, batch, b, self.tree_spec.max_depth)
        return None if builder is None else GrowingKVDraft(builder, start=request.num_computed)

    def _build_trees(self, drafts: list[GrowingKVDraft], page_size: int) -> None:
        requests = [draft.builder.request for draft in drafts]
        spans = [
            Span(
                r.pages, r.num_computed, r.get_tokens(r.num_computed, r.num_tokens), range(1), adapter=r.spec.adapter,
                images=r.spec.images,
            )
            for r in requests
        ]  # fmt: skip
        grow_levels(drafts, self._forward(spans, page_size), partial(self._compute_level, page_size))

    def _compute_level(self, page_size: int, drafts: list[GrowingKVDraft]) -> NodeLogits:
        # the layers are the target's, so they have the request's adapter and the positions after its images
        specs = [draft.builder.request.spec for draft in drafts]
        spans = [
            draft.build_span()._replace(adapter=spec.adapter, images=spec.images)
            for draft, spec in zip(drafts, specs, strict=True)
        ]
        return self._forward(spans, page_size)

    def _forward(self, spans: Sequence[Span], page_size: int) -> NodeLogits:
        forward_batch = ForwardBatch.from_spans(spans, page_size, self.target.device)
        logits, _ = self._get_truncated(self.layer_selector.layer).forward(forward_batch)
        return NodeLogits(logits, self.target.vocab_size)

    def _get_truncated(self, layers: int) -> Truncated:
        if layers not in self._truncated_targets:
            self._truncated_targets[layers] = Truncated(self.target, layers, self.adapter)
        return self._truncated_targets[layers]
