"""Suffix decoding: what followed the longest suffix of the text that is known from somewhere, by how often it did.

After "SuffixDecoding" (2411.04975), SAM-Decoding (2411.10666) and REST (2311.08252). Three sources count: the request's
own text; with `store_tokens` past outputs of the same tenant; with `files` texts given at start. Each is a suffix
automaton (kernels/automaton.py) in which the text's longest match is carried along, so that a token costs O(1) to add
and to look up however long the match. One law is made of all of them: the longest context first, whosever it is (of
equal ones the own text's, then the store's from its newest outputs on, then the files'), each passing on to the next
shorter what it is not sure of.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.base import Context, Draft, plant
from foredraft.drafters.growth import Growth, Plan, Scores, extend
from foredraft.drafters.suffix_files import read
from foredraft.drafters.suffix_store import Section, Store, best
from foredraft.errors import ForedraftError
from foredraft.kernels.automaton import LONGEST, Automaton, Law, Place, Shape, trust
from foredraft.kernels.cpu.suffix import automaton
from foredraft.request import Batch, Request, State
from foredraft.tree import Commit, TokenTree

METHOD = "suffix"
READS_MODEL = False
AUTO_RANK = 20  # among the methods that read nothing but the text; more is better

# taken from every count of contexts of 1, 2, ... tokens, the last of all longer ones: least loss, in bits per token, on
# greedy and sampled code of the built-in target; those published for the sequence memoizer on prose are much the same
DISCOUNTS = (0.75, 0.7, 0.75, 0.75, 0.8, 0.95)
LEAST_STORE = 256


@dataclass(frozen=True)
class Config:
    """A chain of at most num_speculative_tokens, or with `tree_nodes` or `top_k` a tree of the tree_nodes likeliest,
    top_k below each at most. It ends where its likeliest path is less likely than `min_confidence`, and is never longer
    than `tokens_per_match` for each token matched and `free_tokens` more; matches below `min_match` draft nothing.

    `store_tokens`: keep this many tokens of past outputs, of at most `store_tenants` tenants; a request sees those of
    its own cache salt alone. `files`: texts to draft from besides: text, .jsonl or .npy of token ids.
    """

    min_confidence: float = 0.1
    min_match: int = 1
    tokens_per_match: float = 4.0
    free_tokens: int = 2
    tree_nodes: int | None = None
    top_k: int | None = None
    store_tokens: int = 0
    store_tenants: int = 64
    files: str | tuple[str, ...] = ()


@dataclass
class Reading:
    """One request's text, where it stands in every source, and what its last draft was worth."""

    request: Request
    own: Automaton
    num_read: int = 0
    stored: dict[Section, tuple[int, Place]] = field(default_factory=dict)  # the version it was found in, and where
    filed: list[Place] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)  # of all sources, as they were read last
    matched: int = 0  # tokens of the longest match when it was last drafted for
    expected: float = 0.0  # tokens of that draft which should be accepted, going by its law

    def read(self, sections: Sequence[Section]) -> None:
        """Take in what is new of the text."""
        request = self.request
        fresh = request.slice(self.num_read, request.num_tokens)
        self.own.extend(fresh)
        self.num_read = request.num_tokens
        self.filed = self.own.follow(self.filed, fresh)
        self.stored = {section: self._found(section, fresh) for section in sections}
        self.places = [self.own.end(), *best(place for _, place in self.stored.values()), *self.filed]

    def _found(self, section: Section, fresh: list[int]) -> tuple[int, Place]:
        version, place = self.stored.get(section, (-1, Place(section.text)))
        if version != section.version:  # a longer match may be there by now
            place = Place(section.text)
            fresh = self.request.slice(max(0, self.num_read - LONGEST), self.num_read)
        return section.version, self.own.follow([place], fresh)[0]


class Suffix:
    """The verbs. No match, no draft."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, plan: Plan, context: Context, files: Automaton | None = None) -> None:
        self.config = config
        self.plan = plan
        self.num_tokens = context.num_tokens
        self.vocab_size = context.vocab_size
        self.device = context.device
        self.trust = trust(DISCOUNTS)
        self.make = automaton()
        self.files = files
        self.store = Store(config.store_tokens, config.store_tenants, self.make) if config.store_tokens else None
        self._readings: dict[int, Reading] = {}  # by slot
        self._requests: dict[int, Request] = {}  # by slot, where there is a store
        self._left: list[Request] = []  # those that gave up their slots since `_settle`

    @property
    def num_nodes(self) -> int:
        return self.plan.nodes

    def matched(self, slot: int) -> int:
        """Tokens of the longest match when a slot was last drafted for; 0 where it was not."""
        reading = self._readings.get(slot)
        return 0 if reading is None else reading.matched

    def expected(self, slot: int) -> float:
        """Tokens of a slot's last draft that should be accepted, going by its law; 0 where it has none."""
        reading = self._readings.get(slot)
        return 0.0 if reading is None else reading.expected

    def propose(self, batch: Batch) -> TokenTree:
        self._settle()
        return plant(batch, {b: self._draft(batch.requests[b], batch.budgets[b]) for b in batch.drafting()})

    def drafted(self, request: Request, budget: int) -> Draft:
        self._settle()
        return self._draft(request, budget)

    def weighed(self, request: Request) -> int:
        return self.matched(request.slot)

    def extended(self, request: Request, path: Sequence[int], budget: int) -> Draft:
        """By rank, whatever the sampling."""
        config = self.config
        places = self.make.follow(self._read(request).places, path)
        matched = max(place.length for place in places)
        depth = min(self._most(matched, request.room - len(path)), budget)
        if matched < config.min_match or depth < 1:
            return Draft()
        grown = self.make.draft(places, self.trust, Shape(depth, depth, 1, config.min_confidence, request.end_ids))
        return Draft(tuple(grown.tokens), tuple(grown.parents))

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Texts are read when they are drafted for; a store wants to know whose they are."""
        if self.store is not None:
            self._settle()
            self._requests.update((request.slot, request) for request in batch.requests)

    def forget(self, slots: Sequence[int]) -> None:
        self._settle()
        for slot in slots:
            self._readings.pop(slot, None)
            if slot in self._requests:
                self._left.append(self._requests.pop(slot))

    def _settle(self) -> None:
        """Keep the outputs of the requests that have ended. When a slot is given up nothing says yet whether its
        request has, or is preempted and comes back; by the next call of any kind its state does."""
        for request in self._left:
            if request.state is State.OVER and self.store is not None:
                self.store.add(request.tenant, request.output)
        self._left.clear()

    def _read(self, request: Request) -> Reading:
        """A request's reading, at the end of its text."""
        reading = self._readings.get(request.slot)
        if reading is None or reading.request is not request or reading.num_read > request.num_tokens:
            filed = [] if self.files is None else [Place(self.files)]
            reading = self._readings[request.slot] = Reading(request, self.make(), filed=filed)
        reading.read(() if self.store is None else self.store.sections(request.tenant))
        return reading

    def _most(self, matched: int, room: int) -> int:
        """How deep a draft may be on the strength of a match."""
        return int(min(matched * self.config.tokens_per_match + self.config.free_tokens, self.num_tokens, room))

    def _draft(self, request: Request, budget: int) -> Draft:
        reading, config = self._read(request), self.config
        places = reading.places
        reading.matched, reading.expected = max(place.length for place in places), 0.0
        plan = self.plan.cut(self._most(reading.matched, request.room), budget, request.verify == "block")
        if reading.matched < config.min_match or plan.nodes < 1 or plan.depth < 1:
            return Draft()
        if request.sampling.is_greedy and not request.sampling.shapes_logits:
            shape = Shape(plan.nodes, plan.depth, plan.width, config.min_confidence, request.end_ids)
            grown = self.make.draft(places, self.trust, shape)
            reading.expected = sum(grown.chances)
            return Draft(tuple(grown.tokens), tuple(grown.parents))
        return self._grown(Growth(request, plan), reading, places)

    def _grown(self, growth: Growth, reading: Reading, places: list[Place]) -> Draft:
        """Where a law is drawn from, or depends on what came before."""
        at, sure = {0: places}, {0: 1.0}  # by node; sure: that the path to it is right
        while True:
            laws = {node: self.make.law(at[node], self.trust) for node in growth.frontier}
            bar = max(self.config.min_confidence, 1e-9)
            growth.frontier = [n for n, law in laws.items() if law.tokens and sure[n] * law.chances[0] >= bar]
            if not growth.frontier:
                return growth.draft()
            num_before = len(growth.tokens)
            extend([growth], Scores(self._logits([laws[n] for n in growth.frontier]), self.vocab_size))
            for node in range(num_before + 1, len(growth.tokens) + 1):
                token, parent = growth.tokens[node - 1], growth.parents[node - 1]
                chance = dict(zip(*laws[parent], strict=True)).get(token, 0.0)
                reading.expected += sure[parent] * chance
                # how a draft goes on where it is drawn may depend on its laws, never on how lucky the draw was
                sure[node] = sure[parent] * (laws[parent].chances[0] if growth.draws else chance)
                at[node] = self.make.follow(at[parent], [token])

    def _logits(self, laws: Sequence[Law]) -> Tensor:
        """[R, V] -inf for what was never seen here."""
        logits = torch.full((len(laws), self.vocab_size), -math.inf)
        for row, law in zip(logits, laws, strict=True):
            row[law.tokens] = torch.tensor(law.chances, dtype=torch.float64).log().float()
        return logits.to(self.device)


def create(config: Config, context: Context) -> Suffix:
    """Read the files, if there are any. Raises ForedraftError for options that make no draft, and files of no text."""
    plan = Plan.of(context.num_tokens, config.tree_nodes, config.top_k)
    if not 0 <= config.min_confidence < 1:
        raise ForedraftError(f"min_confidence must lie in 0..1, got {config.min_confidence}")
    for name, least in (("min_match", 1), ("free_tokens", 0), ("tokens_per_match", 0), ("store_tenants", 1)):
        if not getattr(config, name) >= least:
            raise ForedraftError(f"{name} must be at least {least}, got {getattr(config, name)}")
    if config.store_tokens and config.store_tokens < LEAST_STORE:
        raise ForedraftError(f"store_tokens must be 0 (none) or at least {LEAST_STORE}, got {config.store_tokens}")
    paths = (config.files,) if isinstance(config.files, str) else config.files
    files = read(paths, context, automaton()()) if paths else None
    return Suffix(config, plan, context, files)
