"""Self-speculation: the target's first layers with its own norm and head draft for the whole of it (LayerSkip,
2404.16710; Draft & Verify, 2309.08168).

The draft has no weights and no memory of its own. It reads the target's keys and values of the layers it runs, and what
it writes lies behind the committed tokens, where the pass that verifies the draft writes again: for the nodes of a path
that is kept the very same, for others what nobody reads. So there is never anything to read in, nothing to forget, and
a prefix that was found is a prefix to draft after. A target that was not trained for it agrees with its own first
layers now and then; an adapter (`foredraft train early_exit`) makes that more often.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.checkpoints.base import Checkpoint, EarlyExitShape
from foredraft.drafters.base import Context, plant
from foredraft.drafters.borrowed import loaded
from foredraft.drafters.branch import Branch
from foredraft.drafters.early_exit_adapter import ExitAdapter
from foredraft.drafters.early_exit_choice import Choice, Given, measured
from foredraft.drafters.early_exit_training import TrainConfig, trainee
from foredraft.drafters.growth import Growth, Plan, Scores, TreeOptions, extend
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel
from foredraft.models.truncated import Adapter, Truncated, check_exit
from foredraft.models.window import Span, Window
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree

__all__ = ["METHOD", "Config", "EarlyExit", "TrainConfig", "create", "trainee"]

METHOD = "early_exit"


@dataclass(frozen=True)
class Config(TreeOptions):
    """`exit_layer`: how many of the target's layers draft; None = the adapter's, or without one those that measurement
    says are worth most."""

    exit_layer: int | None = None


class EarlyExit:
    """Drafts level by level, all requests of a batch in one pass per level.

    shares_memory: it reads and writes the target's own pages, so whoever steps it without an engine has to write there
    what the target would, and whoever gives it to an engine has to `attach` it.
    """

    shares_memory = True

    def __init__(self, target: HFModel, choice: Choice, plan: Plan, adapter: Adapter | None = None) -> None:
        self.target = target
        self.choice = choice
        self.plan = plan
        self.adapter = adapter
        self._cuts: dict[int, Truncated] = {}
        self._is_attached = False
        self._cut(choice.layer)  # refused now rather than at the first draft

    @property
    def taps(self) -> tuple[int, ...]:
        return self.choice.taps

    @property
    def num_nodes(self) -> int:
        return self.plan.nodes

    def attach(self, target: HFModel) -> None:
        """Say whose memory it drafts in, once. Raises ForedraftError for another model, or a second engine: pages of
        the one are not those of the other, and both would go on drafting."""
        if target.model is not self.target.model:
            raise ForedraftError(f"this early_exit drafter is made of {self.target.name}; make one for {target.name}")
        if target.pool is not self.target.pool:
            if self._is_attached:
                raise ForedraftError(
                    "this early_exit drafter drafts in another engine's memory; make one for each engine"
                )
            self.target = target
            self._cuts.clear()
        self._is_attached = True

    def propose(self, batch: Batch) -> TokenTree:
        branches = {b: branch for b in batch.drafting() if (branch := self._branch(batch, b)) is not None}
        if branches:
            self._grow(list(branches.values()), batch.page_size)
        return plant(batch, {b: branch.growth.draft() for b, branch in branches.items()})

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.choice.see(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing is kept of a request."""

    def _branch(self, batch: Batch, b: int) -> Branch | None:
        """None where the target has yet to compute more than the last token: a prompt, or part of one."""
        request = batch.requests[b]
        if request.computed != request.num_tokens - 1:
            return None
        plan = self.plan.cut(max(request.room, 0), batch.budgets[b], request.verify == "block")
        return Branch(Growth(request, plan), request.computed) if plan.nodes > 0 and plan.depth > 0 else None

    def _grow(self, branches: list[Branch], page_size: int) -> None:
        roots = [branch.growth.request for branch in branches]
        spans = [Span(r.pages, r.computed, r.slice(r.computed, r.num_tokens), range(1)) for r in roots]
        while True:
            logits = self._forward(spans, page_size)
            extend([branch.growth for branch in branches], Scores(logits, self.target.vocab_size))
            branches = [branch for branch in branches if branch.growth.frontier]
            if not branches:
                return
            spans = [branch.span() for branch in branches]

    def _forward(self, spans: Sequence[Span], page_size: int) -> Tensor:
        window = Window.after(spans, page_size, self.target.device)
        return self._cut(self.choice.layer).forward(window)[0]

    def _cut(self, layers: int) -> Truncated:
        if layers not in self._cuts:
            self._cuts[layers] = Truncated(self.target, layers, self.adapter)
        return self._cuts[layers]


def create(config: Config, context: Context) -> EarlyExit:
    """With the adapter that was asked for, or the built-in one where it fits. Raises ForedraftError for a layer that
    the target does not have, or an adapter that is another target's."""
    plan, target = config.plan(context.num_tokens), _target(context)
    if config.exit_layer is not None:
        check_exit(target, config.exit_layer)
    if context.model is not None or context.builtin is not None:
        checkpoint = loaded(context, METHOD)
        if context.model is not None or config.exit_layer in (None, _shape(checkpoint).exit_layer):
            return from_checkpoint(config, checkpoint, context)
    given = config.exit_layer
    choice = measured(target, (plan.depth, plan.nodes)) if given is None else Given(given)
    return EarlyExit(target, choice, plan)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: Context) -> EarlyExit:
    """From an adapter that is loaded."""
    shape, target = _shape(checkpoint), _target(context)
    if config.exit_layer not in (None, shape.exit_layer):
        raise ForedraftError(
            f"{checkpoint.folder} is an adapter for layer {shape.exit_layer}, not {config.exit_layer}; leave "
            "exit_layer out, or draft without the adapter"
        )
    adapter = ExitAdapter.loaded(shape, checkpoint.tensors, target).to(target.device, context.dtype).eval()
    return EarlyExit(target, Given(shape.exit_layer), config.plan(context.num_tokens), adapter)


def _shape(checkpoint: Checkpoint) -> EarlyExitShape:
    if not isinstance(checkpoint.shape, EarlyExitShape):
        raise ForedraftError(f"{checkpoint.folder} holds no early-exit adapter but {checkpoint.format}")
    return checkpoint.shape


def _target(context: Context) -> HFModel:
    """A decoder alone; an encoder's text is not in the pages that are shared."""
    target = context.target
    if target is None:
        raise ForedraftError("the method early_exit drafts with the target itself; give Context a target")
    if not isinstance(target, HFModel) or getattr(target.model.config, "is_encoder_decoder", False):
        raise ForedraftError(f"the method early_exit needs a decoder-only target, and {context.target_name} is none")
    return target
