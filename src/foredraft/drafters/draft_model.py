"""An independent, smaller model drafts: a chain (2211.17192), or a tree of its likeliest or drawn tokens (SpecInfer).

It keeps its own KV on the target's page ids. What it holds valid is a prefix of the committed tokens; whatever is
missing (the prompt, a token its last draft ended with, a stretch without drafting) is read in before it drafts.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft import noise
from foredraft.drafters.base import Context, Draft, draft_key, plant
from foredraft.drafters.draft_training import TrainConfig, trainee
from foredraft.errors import ForedraftError
from foredraft.filters import likeliest
from foredraft.kernels.quantize import check_quantization
from foredraft.kv.pool import keep
from foredraft.models.lm import LM, HFModel
from foredraft.models.load import check_vocabularies, load_model, load_tokenizer
from foredraft.models.window import Span, Window
from foredraft.request import Batch, Request
from foredraft.sampling import Sampling, distribution, shaped
from foredraft.tree import Commit, TokenTree

__all__ = ["METHOD", "Config", "DraftModel", "TrainConfig", "create", "trainee"]

METHOD = "draft_model"
CHUNK = 512  # prompt tokens read in one pass


@dataclass(frozen=True)
class Config:
    """`branching`: children of every node by depth, e.g. (3, 2, 1, 1); None = a chain of num_speculative_tokens.

    `quantization`: "int8" or "int4" weights of the draft, None = as stored.
    """

    branching: tuple[int, ...] | None = None
    quantization: str | None = None


@dataclass
class Sketch:
    """A draft while it grows. Node 0 is the root."""

    request: Request
    shape: tuple[int, ...]  # children of every node by depth, cut to the room there is
    tokens: list[int] = field(default_factory=list)  # [i] is node i + 1
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=lambda: [0])
    laws: dict[int, Tensor] = field(default_factory=dict)  # node -> [V] the law its children were drawn from
    frontier: list[int] = field(default_factory=lambda: [0])

    def path(self, node: int) -> list[int]:
        result = []
        while node:
            result.append(self.tokens[node - 1])
            node = self.parents[node - 1]
        return result[::-1]

    def grow(self, children: Sequence[Sequence[int]]) -> None:
        """One level more: the children of every frontier node."""
        below: list[int] = []
        for node, tokens in zip(self.frontier, children, strict=True):
            for token in tokens:
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
                below.append(len(self.tokens))
        self.frontier = below

    def span(self) -> Span:
        """The frontier as part of a window, seeing its ancestors among the nodes before it."""
        is_chain = self.parents == list(range(len(self.parents)))
        parents = None if is_chain else [-1, *self.parents]
        tokens = [self.tokens[node - 1] for node in self.frontier]
        start = self.request.num_tokens - 1
        return Span(self.request.pages, start, tokens, self.depths, parents, self.frontier[0])

    def draft(self) -> Draft:
        if not self.laws:
            return Draft(tuple(self.tokens), tuple(self.parents))
        blank = torch.zeros_like(next(iter(self.laws.values())))
        q = torch.stack([self.laws.get(node, blank) for node in range(len(self.depths))])
        return Draft(tuple(self.tokens), tuple(self.parents), q)


class DraftModel:
    """Drafts with an LM of its own, level by level, all requests of a batch in one pass per level."""

    taps: tuple[int, ...] = ()

    def __init__(self, lm: LM, context: Context, branching: tuple[int, ...] | None = None) -> None:
        self.lm = lm
        self.context = context
        self.shape = branching or (1,) * context.num_tokens
        self.valid: dict[int, int] = {}  # slot -> committed tokens whose draft KV is right
        self._page_size = 0  # of the batch that is drafted for
        self._held: dict[int, int] = {}  # slot -> nodes of the last draft whose KV was written, root included

    @property
    def num_nodes(self) -> int:
        return _num_nodes(self.shape)

    def propose(self, batch: Batch) -> TokenTree:
        self._held.clear()
        sketches = {b: s for b in batch.drafting() if (s := self._sketch(batch, b)) is not None}
        if sketches:
            self._page_size = batch.page_size
            self._extend(list(sketches.values()), self._read_in(list(sketches.values())))
            for depth in range(1, max(len(s.shape) for s in sketches.values())):
                growing = [s for s in sketches.values() if depth < len(s.shape) and s.frontier]
                if growing:
                    self._extend(growing, self._forward([s.span() for s in growing], last_only=False))
        empty = Draft()
        return plant(batch, [sketches[b].draft() if b in sketches else empty for b in range(len(batch))])

    def observe(self, batch: Batch, commit: Commit) -> None:
        rows = [b for b, r in enumerate(batch.requests) if r.slot in self._held]
        starts, paths = [], []
        for b in rows:
            request, offset = batch.requests[b], batch.chunks[b] - 1
            path = [node - offset for node in commit.path_lists[b][offset:]]
            path = [node for node in path if node < self._held[request.slot]]
            starts.append(request.num_tokens - 1)
            paths.append(path)
            self.valid[request.slot] = request.num_tokens - 1 + len(path)
        pages = [batch.requests[b].pages for b in rows]
        keep(self.lm.pool, paths, starts, pages, batch.page_size, self.context.device)
        self._held.clear()  # a step in which nobody may draft observes too, and wrote nothing here

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.valid.pop(slot, None)
            self._held.pop(slot, None)

    def _sketch(self, batch: Batch, b: int) -> Sketch | None:
        request = batch.requests[b]
        depth = min(request.room, self.lm.context_length - request.num_tokens + 1)
        # block verification takes chains
        shape = ((1,) * len(self.shape) if request.verify == "block" else self.shape)[: max(depth, 0)]
        while shape and _num_nodes(shape) > batch.budgets[b]:
            shape = shape[:-1]
        return Sketch(request, shape) if shape else None

    def _read_in(self, sketches: Sequence[Sketch]) -> Tensor:
        """Bring every request's KV up to its last committed token; logits [R, V] after it."""
        spans = []
        for sketch in sketches:
            request = sketch.request
            start = self.valid.get(request.slot, 0)
            while request.num_tokens - start > CHUNK:
                self._forward([_chain(request, start, start + CHUNK)], last_only=True)
                start += CHUNK
            spans.append(_chain(request, start, request.num_tokens))
        logits = self._forward(spans, last_only=True)
        for sketch in sketches:  # not before the pass: it may fail
            self.valid[sketch.request.slot] = sketch.request.num_tokens
        return logits

    def _forward(self, spans: Sequence[Span], last_only: bool) -> Tensor:
        rows: list[int] = []
        offset = 0
        for span in spans:
            n = len(span.tokens)
            rows += [offset + n - 1] if last_only else range(offset, offset + n)
            offset += n
        window = Window.build(spans, rows, self._page_size, self.context.device)
        logits, _ = self.lm.forward(window)
        missing = self.context.vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _extend(self, sketches: Sequence[Sketch], logits: Tensor) -> None:
        """Draw the children of every frontier node from its row of logits [R, V]."""
        nodes = [(s, node) for s in sketches for node in s.frontier]
        samplings = [_sampling(s) for s, _ in nodes]
        history = None
        if any(sampling.shapes_logits for sampling in samplings):
            history = [s.request.history(s.path(node)) for s, node in nodes]
        if all(sampling.is_greedy for sampling in samplings):  # and one child each: see _sampling
            found = likeliest(shaped(logits, samplings, history))
            drawn = [[token] if token >= 0 else [] for token in found]
        else:
            drawn = self._draw(nodes, distribution(logits, samplings, history))
        children = iter(drawn)
        for s in sketches:
            self._held[s.request.slot] = len(s.depths)
            s.grow([next(children) for _ in s.frontier])

    def _draw(self, nodes: Sequence[tuple[Sketch, int]], q: Tensor) -> list[list[int]]:
        widths = [s.shape[s.depths[node]] for s, node in nodes]
        greedy = [s.request.sampling.is_greedy for s, _ in nodes]
        scores = q
        if not all(greedy):
            keys = [draft_key(s.request, node, s.depths[node]) for s, node in nodes]
            raced = noise.race(q, torch.tensor(keys, device=q.device))
            scores = torch.where(torch.tensor(greedy, device=q.device)[:, None], q.double(), raced)
        best = scores.topk(max(widths), -1)
        children = []
        for row, ((s, node), width) in enumerate(zip(nodes, widths, strict=True)):
            if s.request.verify in ("reject", "block") and not greedy[row]:
                s.laws[node] = q[row]
            ids, values = best.indices[row, :width].tolist(), best.values[row, :width].tolist()
            # what q gives no probability was not drawn; NaN compares false, and so drafts nothing
            children.append([token for token, value in zip(ids, values, strict=True) if value > 0])
        return children


def _num_nodes(shape: Sequence[int]) -> int:
    total, level = 0, 1
    for width in shape:
        level *= width
        total += level
    return total


def _sampling(sketch: Sketch) -> Sampling:
    """Greedy trees guess: their siblings are the likeliest tokens, which a one-hot law could not rank."""
    sampling = sketch.request.sampling
    return replace(sampling, temperature=1.0) if sampling.is_greedy and max(sketch.shape) > 1 else sampling


def _chain(request: Request, start: int, stop: int) -> Span:
    tokens = request.slice(start, stop)
    return Span(request.pages, start, tokens, range(len(tokens)))


def create(config: Config, context: Context) -> DraftModel:
    """Load the draft beside the target. Raises ForedraftError if it does not share the target's vocabulary."""
    name = context.model or context.builtin
    if name is None:
        raise ForedraftError("the method draft_model needs a draft: give --spec-model PATH (or {'model': PATH})")
    if config.branching is not None and (not config.branching or min(config.branching) < 1):
        raise ForedraftError(f"branching takes positive numbers of children by depth, got {config.branching}")
    check_quantization(config.quantization)
    model = load_model(name, context.dtype, context.device)
    lm = HFModel.adopt(model, name, context.fused, is_ours=True, quantization=config.quantization)
    check_vocabularies(
        (context.target_name, context.tokenizer, context.vocab_size), (name, load_tokenizer(name), lm.vocab_size)
    )
    if context.target_parameters and lm.num_parameters > context.target_parameters:
        warnings.warn(
            f"the draft {name} has more parameters ({lm.num_parameters:,}) than its target "
            f"({context.target_parameters:,}); it will slow generation down",
            stacklevel=2,
        )
    return DraftModel(lm, context, config.branching)
