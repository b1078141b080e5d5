"""What a drafter is: three verbs, a registry that is the folder, and a tree built from guesses."""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import ModuleType, NoneType, UnionType
from typing import Any, Generic, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints, runtime_checkable

import torch
from torch import Tensor

from foredraft import noise
from foredraft.errors import suggest
from foredraft.models.lm import HFModel
from foredraft.noise import Purpose
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

C = TypeVar("C")
COMMON = ("method", "num_speculative_tokens", "model")  # keys of every drafter's dict; the last of those that read one
KINDS = {int: "whole number", float: "number", str: "string", bool: "bool"}


@runtime_checkable
class Drafter(Protocol):
    """Proposes token trees. It is untrusted: whatever it does may cost speed, never output.

    `propose` returns one tree row per request of the batch, node 0 the last committed token, at most
    `batch.budgets[b]` drafted nodes below it. `observe` follows every target pass, prompts included. `forget` ends
    what is kept for slots whose request ended, was aborted or preempted. One with `wants_answers` = True finds in
    `Commit.answers` what the target says after every node of the tree, the rejected ones included.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Boundaries of the target's layers to see in `Commit.features`; () = tokens only."""

    @property
    def num_nodes(self) -> int:
        """Nodes it may propose below a root at most; slots for them are reserved before every pass."""

    def propose(self, batch: Batch) -> TokenTree: ...

    def observe(self, batch: Batch, commit: Commit) -> None: ...

    def forget(self, slots: Sequence[int]) -> None: ...


@runtime_checkable
class TextPart(Protocol):
    """What a composition asks of a drafter that needs nothing but the committed text. TextDrafter has it."""

    def drafted(self, request: Request, budget: int) -> "Draft":
        """The draft of one request, at most `budget` nodes."""

    def weighed(self, request: Request) -> int:
        """How much speaks for what was just drafted, from the committed text alone: the tokens of a match, say. Drafts
        for which the same speaks are taken to be equally good; 0 = it cannot tell."""

    def extended(self, request: Request, path: Sequence[int], budget: int) -> "Draft":
        """Guesses below the last token of `path` (at least one token), as if that were committed too."""


def methods() -> dict[str, ModuleType]:
    """Every method: a module of this package that has METHOD, Config and create."""
    import foredraft.drafters as package

    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        if hasattr(module, "METHOD"):
            found[module.METHOD] = module
    return found


def meant_by(name: object) -> tuple[ModuleType, dict[str, Any]]:
    """The module that a method's name means, and the options that the name implies. Raises ValueError for a word that
    nobody knows.

    A module with `named(name) -> options or None` takes names beyond its METHOD: `a+b`, `auto`.
    """
    known = methods()
    if not isinstance(name, str):
        raise ValueError(f"unknown method {name!r}; give its name, several as a+b, or a model whose folder tells it")
    if name in known:
        return known[name], {}
    for module in known.values():
        implied = module.named(name) if hasattr(module, "named") else None
        if implied is not None:
            return module, implied
    raise ValueError(
        f"unknown method {name!r}; use none or one of {', '.join(sorted(known))}; auto, or several as a+b"
        f"{suggest(name, ['none', 'auto', *known])}"
    )


def configured(method: ModuleType, options: dict[str, Any]) -> Any:
    """A method's Config from its options. Raises ValueError naming what is wrong."""
    if hasattr(method, "configure"):
        return method.configure(options)
    return parse(method.Config, options, COMMON if reads_model(method) else COMMON[:2])


def reads_model(method: ModuleType) -> bool:
    """Whether a method drafts with something that a user can name; one that reads nothing but text says so."""
    return bool(getattr(method, "READS_MODEL", True))


def parse(config: type[C], options: dict[str, Any], beside: Sequence[str] = ()) -> C:
    """A method's Config from a dict. Raises ValueError naming what is unknown and what is known, or what is of another
    type than the Config says. beside: keys that are read before and belong in the list of what is known."""
    known = {spec.name for spec in fields(config)}  # type: ignore[arg-type]
    unknown = sorted(set(options) - known)
    if unknown:
        names = sorted({*known, *beside})
        raise ValueError(
            f"unknown drafter option {unknown[0]!r}; this method takes: {', '.join(names)}{suggest(unknown[0], names)}"
        )
    hints = get_type_hints(config)
    for name, value in options.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"the option {name} takes {_said(hints[name])}, got {value!r}")
    return config(**options)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what a field is annotated with; lists serve as tuples, whole numbers as any."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is tuple:
        return isinstance(value, list | tuple) and all(_fits(entry, inner[0]) for entry in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _said(hint: Any, article: str = "a ", plural: str = "") -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_said(one) for one in get_args(hint) if one is not NoneType)
    if get_origin(hint) is tuple:
        return f"{article}list{plural} of {_said(get_args(hint)[0], '', 's')}"
    return f"{article}{KINDS.get(hint, str(hint))}{plural}"


@dataclass(frozen=True)
class Context:
    """What the engine tells a method when it makes a drafter."""

    vocab_size: int  # V of the target's logits; every q has this width
    target: HFModel | None = None  # what a drafter may borrow from: embeddings, lm_head, and its shape
    num_tokens: int = 5  # draft length K
    model: str | None = None  # what the user gave as the draft model: a folder or hub id
    loaded: Any = None  # a loaded transformers model, given in its place
    tokenizer: Any = None  # the target's, or None for a model folder without one
    target_name: str = "target"
    target_parameters: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    fused: bool = True  # run recognised draft models as native code
    builtin: str | None = None  # the zoo entry beside the built-in target for this method, if there is one
    builtins: Mapping[str, str] = field(default_factory=dict)  # the same for every method that has one
    guarded: "Callable[[Drafter, str], Drafter]" = lambda drafter, name: drafter  # so that parts of one fail alone


@dataclass(frozen=True)
class Draft:
    """One request's proposal below its root: ragged lists, parents relative to the root (node 0)."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: Tensor | None = None  # [1 + len(tokens), V] the law drawn from after the root and every node

    @classmethod
    def chain(cls, tokens: Sequence[int], q: Tensor | None = None) -> "Draft":
        return cls(tuple(tokens), tuple(range(len(tokens))), q)

    @classmethod
    def merged(cls, paths: Sequence[Sequence[int]], budget: int) -> "Draft":
        """Guessed continuations as one tree: common beginnings share nodes; earlier paths come first."""
        tokens: list[int] = []
        parents: list[int] = []
        index: dict[tuple[int, int], int] = {}
        for path in paths:
            node = 0
            for token in path:
                child = index.get((node, token))
                if child is None:
                    if len(tokens) == budget:
                        break
                    tokens.append(token)
                    parents.append(node)
                    child = index[node, token] = len(tokens)
                node = child
        return cls(tuple(tokens), tuple(parents))

    def trimmed(self, depth: int) -> "Draft":
        """Without the nodes deeper than `depth`."""
        if len(self.tokens) <= depth:  # cannot be deeper than that
            return self
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        if max(depths) <= depth:
            return self
        kept = [node for node, d in enumerate(depths) if d <= depth]
        index = {node: i for i, node in enumerate(kept)}
        return Draft(
            tuple(self.tokens[node - 1] for node in kept[1:]),
            tuple(index[self.parents[node - 1]] for node in kept[1:]),
            None if self.q is None else self.q[kept],
        )


class Learnt(Protocol):
    """What a text alone teaches, token by token."""

    tokens: list[int]

    def extend(self, tokens: Sequence[int]) -> None: ...


L = TypeVar("L", bound=Learnt)


class TextDrafter(ABC, Generic[L]):
    """The verbs of a drafter that needs nothing but each request's own tokens, read when it is drafted for."""

    taps: tuple[int, ...] = ()

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._learnt: dict[int, L] = {}  # by slot

    @property
    def num_nodes(self) -> int:
        return self.num_tokens

    @abstractmethod
    def start(self) -> L:
        """What is known of a request before its first token."""

    @abstractmethod
    def draft(self, learnt: L, request: Request, depth: int, budget: int) -> Draft:
        """At most `budget` nodes, none deeper than `depth`, which is at least one."""

    def weigh(self, learnt: L) -> int:
        """How much speaks for the draft that would be made now, from the committed text alone: the tokens of a match,
        say. Drafts for which the same speaks are taken to be equally good; 0 = it cannot tell."""
        return 0

    def extend(self, learnt: L, request: Request, path: Sequence[int], depth: int, budget: int) -> Draft:
        """The draft that would be made if `path` (at least one token) were committed too; none where it cannot say."""
        return Draft()

    def propose(self, batch: Batch) -> TokenTree:
        return plant(batch, {b: self.drafted(batch.requests[b], batch.budgets[b]) for b in batch.drafting()})

    def drafted(self, request: Request, budget: int) -> Draft:
        """Of one request, at most `budget` nodes."""
        learnt = self._read(request)
        depth = min(self.num_tokens, budget, request.room)
        return self.draft(learnt, request, depth, budget) if depth > 0 else Draft()

    def weighed(self, request: Request) -> int:
        """`weigh`, of one request that was just drafted for."""
        return self.weigh(self._learnt[request.slot])

    def extended(self, request: Request, path: Sequence[int], budget: int) -> Draft:
        """`extend`, of one request: at most `budget` nodes below the last token of `path`."""
        depth = min(self.num_tokens, budget, request.room - len(path))
        return self.extend(self._read(request), request, path, depth, budget) if depth > 0 else Draft()

    def _read(self, request: Request) -> L:
        learnt = self._learnt.get(request.slot)
        if learnt is None:
            learnt = self._learnt[request.slot] = self.start()
        learnt.extend(request.slice(len(learnt.tokens), request.num_tokens))
        return learnt

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Nothing: the text says it all."""

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._learnt.pop(slot, None)


def plant(batch: Batch, drafts: Mapping[int, Draft]) -> TokenTree:
    """Drafts below the last committed token of a request's chunk, by place in the batch, cut to the depth each request
    has room for; nothing for the others.

    q is stacked only if some draft brings one; a row of zeros stands for guesses.
    """
    empty = Draft()
    every = [drafts.get(b, empty).trimmed(request.room) for b, request in enumerate(batch.requests)]
    tokens = [[batch.root(b), *draft.tokens] for b, draft in enumerate(every)]
    parents = [[-1, *draft.parents] for draft in every]
    return TokenTree.of(tokens, parents, _stack_q(batch, every))


def bare(batch: Batch) -> TokenTree:
    """No draft for anyone: roots alone."""
    return TokenTree([[batch.root(b)] for b in range(len(batch))], [[-1] for _ in batch.requests])


def _stack_q(batch: Batch, drafts: Sequence[Draft]) -> Tensor | None:
    laws = [draft.q for draft in drafts if draft.q is not None]
    if not laws:
        return None
    guess = laws[0].new_zeros(1, laws[0].shape[-1])
    scored = [draft for draft, is_scored in zip(drafts, batch.scored, strict=True) if is_scored]
    return torch.cat([guess.expand(1 + len(d.tokens), -1) if d.q is None else d.q for d in scored])


def draft_key(request: Request, node: int, depth: int) -> int:
    """The noise key for drawing below a node of the draft (0 = the root, at depth 0).

    Under `match` it is the key the target itself will draw with, which is what makes the two agree; under the other
    rules it depends on where the step began, so that no step sees again the bits of a rejected draft.
    """
    position = request.num_tokens - 1
    if request.verify == "match":
        return noise.key(request.seed, request.sample, Purpose.TOKEN, position + depth + 1)
    return noise.key(request.seed, request.sample, Purpose.DRAFT, position, node)
