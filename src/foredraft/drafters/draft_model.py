"""An independent, smaller model drafts: a chain (2211.17192), or a tree of its likeliest or drawn tokens
(SpecInfer 2305.09781, EAGLE-2 2406.16858).

It keeps its own KV on the target's page ids. What it holds valid is a prefix of the committed tokens; whatever is
missing (the prompt, a token its last draft ended with, a stretch without drafting) is read in before it drafts. Pages
that the request shares may be written while they are: entry t comes from the tokens up to t alone, which are the same
for everyone who holds the page.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.drafters.base import Context, plant
from foredraft.drafters.branch import Branch
from foredraft.drafters.draft_training import TrainConfig, trainee
from foredraft.drafters.fit import Fit
from foredraft.drafters.foreign import Side, check_word, way
from foredraft.drafters.growth import Growth, Scores, TreeOptions, extend
from foredraft.drafters.translated import Translated
from foredraft.errors import ForedraftError
from foredraft.kernels.quantize import check_quantization
from foredraft.kv.memory import DraftMemory
from foredraft.kv.pool import keep
from foredraft.models.adopt import adopt
from foredraft.models.lm import LM
from foredraft.models.load import load_model, load_tokenizer
from foredraft.models.window import Span, Window
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

__all__ = ["METHOD", "Config", "DraftModel", "TrainConfig", "create", "trainee"]

METHOD = "draft_model"
TAKES_LOADED = True  # a model in memory serves as well as a folder
AUTO_RANK = 60  # among the methods that read a model, as measured on the built-in target
CHUNK = 512  # prompt tokens read in one pass


@dataclass(frozen=True)
class Config(TreeOptions):
    """`quantization`: "int8" or "int4" weights of the draft, None = as stored.

    `vocab`: what to do where the draft's vocabulary is not the target's (`foreign.py`). `draft_kv_tokens`: what its KV
    memory holds then, of all requests together; None = a quarter of the free memory at most.
    """

    quantization: str | None = None
    vocab: str = "auto"
    draft_kv_tokens: int | None = None


class DraftModel:
    """Drafts with an LM of its own, level by level, all requests of a batch in one pass per level."""

    taps: tuple[int, ...] = ()
    vocab = "same"

    def __init__(self, lm: LM, context: Context, options: TreeOptions | None = None) -> None:
        self.lm = lm
        self.context = context
        self.plan = (options or TreeOptions()).plan(context.num_tokens)
        measure = getattr(lm, "bytes_per_token", None)  # an LM without keys and values takes none
        self.memory = DraftMemory(lm.pool, 0 if measure is None else measure())
        self._drafted: dict[int, Branch] = {}  # slot -> the last draft
        self.fit = Fit(context)

    @property
    def num_nodes(self) -> int:
        return self.plan.nodes

    @property
    def valid(self) -> dict[int, int]:
        """Slot -> committed tokens whose draft KV is right."""
        return self.memory.valid

    def propose(self, batch: Batch) -> TokenTree:
        self._drafted.clear()
        branches = {b: branch for b in batch.drafting() if (branch := self._branch(batch, b)) is not None}
        if branches:
            self._grow(list(branches.values()), batch.page_size)
        return self.fit.proposed(batch, plant(batch, {b: branch.growth.draft() for b, branch in branches.items()}))

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.fit.observed(batch, commit)
        rows = [b for b, r in enumerate(batch.requests) if r.slot in self._drafted]
        starts, paths = [], []
        for b in rows:
            request, offset = batch.requests[b], batch.chunks[b] - 1
            branch = self._drafted[request.slot]
            kept = branch.growth.kept
            below = [node - offset for node in commit.path_lists[b][offset:]]
            nodes = [kept[node] for node in below if node < len(kept)]  # beyond: of a tree this one was merged into
            path = [branch.places[node] for node in nodes if node in branch.places]  # the last may not be written
            starts.append(request.num_tokens - 1)
            paths.append(path)
            self.valid[request.slot] = request.num_tokens - 1 + len(path)
        pages = [batch.requests[b].pages for b in rows]
        keep(self.lm.pool, paths, starts, pages, batch.page_size, self.context.device)
        self._drafted.clear()  # a step in which nobody may draft observes too, and wrote nothing here

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.valid.pop(slot, None)
            self._drafted.pop(slot, None)

    def _branch(self, batch: Batch, b: int) -> Branch | None:
        request = batch.requests[b]
        depth = min(request.room, self.lm.context_length - request.num_tokens + 1)
        plan = self.plan.cut(max(depth, 0), batch.budgets[b], request.verify == "block")
        return Branch(Growth(request, plan), request.num_tokens - 1) if plan.nodes > 0 and plan.depth > 0 else None

    def _grow(self, branches: list[Branch], page_size: int) -> None:
        logits = self._read_in([branch.growth.request for branch in branches], page_size)
        for branch in branches:
            self._drafted[branch.growth.request.slot] = branch
        while True:
            extend([branch.growth for branch in branches], Scores(logits, self.context.vocab_size))
            branches = [branch for branch in branches if branch.growth.frontier]
            if not branches:
                return
            logits = self._forward([branch.span() for branch in branches], page_size, last_only=False)

    def _read_in(self, requests: Sequence[Request], page_size: int) -> Tensor:
        """Bring every request's KV up to its last committed token; logits [R, W] after it."""
        spans = []
        for request in requests:
            start = self.valid.get(request.slot, 0)
            while request.num_tokens - start > CHUNK:
                self._forward([_chain(request, start, start + CHUNK)], page_size, last_only=True)
                start += CHUNK
            spans.append(_chain(request, start, request.num_tokens))
        logits = self._forward(spans, page_size, last_only=True)
        for request in requests:  # not before the pass: it may fail
            self.valid[request.slot] = request.num_tokens
        return logits

    def _forward(self, spans: Sequence[Span], page_size: int, last_only: bool) -> Tensor:
        logits, _ = self.lm.forward(Window.after(spans, page_size, self.context.device, last_only))
        return logits[:, : self.context.vocab_size]  # padding of a draft's vocabulary is never drafted


def _chain(request: Request, start: int, stop: int) -> Span:
    tokens = request.slice(start, stop)
    return Span(request.pages, start, tokens, range(len(tokens)), source=request.source)


def check_kinds(context: Context, has_encoder: bool, name: str) -> None:
    """Raises ForedraftError where one of target and draft reads a source and the other has nowhere to put it."""
    if context.target is None or context.target.has_encoder == has_encoder:
        return
    one, other = ("an encoder-decoder model", "a decoder alone")[:: 1 if has_encoder else -1]
    raise ForedraftError(
        f"{name} is {one} and {context.target_name} {other}; use a draft that is built like its target, or a method "
        "without a model, such as ngram"
    )


def create(config: Config, context: Context) -> DraftModel | Translated:
    """Load the draft beside the target. Raises ForedraftError if it has another vocabulary that nothing can be done
    about."""
    name = context.model or context.builtin
    if context.loaded is not None:
        name = getattr(context.loaded, "name_or_path", "") or type(context.loaded).__name__
    if name is None:
        raise ForedraftError("the method draft_model needs a draft: give --spec-model PATH (or {'model': PATH})")
    check_quantization(config.quantization)
    check_word(config.vocab)
    config.plan(context.num_tokens)  # options that make none are refused before anything is loaded
    is_ours = context.loaded is None
    model = load_model(name, context.dtype, context.device) if is_ours else context.loaded
    check_kinds(context, model.config.is_encoder_decoder, name)
    lm = adopt(model, name, context.fused, is_ours=is_ours, quantization=config.quantization)
    # a loaded model comes without a tokenizer: its vocabulary is the target's, or the sizes differ and it is refused
    tokenizer = load_tokenizer(name, lm.vocab_size) if is_ours else context.tokenizer
    draft = Side(name, tokenizer, lm.vocab_size)
    target = Side(context.target_name, context.tokenizer, context.vocab_size)
    make = way(config.vocab, target, draft, config.has_tree)
    if context.target_parameters and lm.num_parameters > context.target_parameters:
        warnings.warn(
            f"the draft {name} has more parameters ({lm.num_parameters:,}) than its target "
            f"({context.target_parameters:,}); it will slow generation down",
            stacklevel=2,
        )
    return DraftModel(lm, context, config) if make is None else make(lm, context, config, config.draft_kv_tokens)
