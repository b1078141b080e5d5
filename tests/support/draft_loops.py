"""Pairs of equal drafters, one of which drafts in a recorded loop: after the same commits they must draft the same."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from foredraft.kernels.gpu.graphs import CallingRecorder, Recorder
from foredraft.kernels.gpu.loading import GPUKernels
from foredraft.kv.allocator import PageAllocator
from foredraft.kv.pool import KVPool
from foredraft.request import Batch, Request
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit, TokenTree
from foredraft.verification.registry import RULES
from tests.support.requests import make_request
from tests.support.torch_kernels import make_torch_kernels

PAGE_SIZE, NUM_PAGES = 4, 200
HAS_GPU = torch.cuda.is_available()  # before one is pretended


@contextmanager
def record_loops(recorder: Recorder, kernels: GPUKernels) -> Iterator[None]:
    """Make drafters as on a GPU: with kernels in their pools, and loops."""
    with (
        mock.patch("foredraft.kv.pool.select_kernels", return_value=kernels),
        mock.patch("foredraft.kv.pool.make_recorder", return_value=recorder),
        mock.patch("foredraft.drafters.common.device_loop.loop.make_recorder", return_value=recorder),
    ):
        yield


def make_pair(
    make: Callable[[], Any],
    recorder: Recorder | None = None,
    kernels: GPUKernels | None = None,
    num_slots: int = PAGE_SIZE * NUM_PAGES,
) -> tuple[Any, Any]:
    """Make a drafter with a loop, and one without. By default recordings call the function."""
    with record_loops(recorder or CallingRecorder(), kernels or make_torch_kernels()):
        pair = make(), make()
    for drafter in pair:
        pool = get_pool(drafter)
        if pool is not None:
            pool.capacity, pool.is_whole = num_slots, True
    assert pair[0].loop is not None
    pair[1].loop = None
    return pair


def get_pool(drafter: Any) -> KVPool | None:
    """Return the KV cache of a drafter; None if it has none."""
    return drafter.lm.pool if hasattr(drafter, "lm") else None


@dataclass
class Twins:
    """Two drafters of equal weights: `looping` has a loop, `reference` grows level by level."""

    looping: Any
    reference: Any
    width: int  # of the features
    vocab_size: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    page_size: int = PAGE_SIZE
    num_pages: int = NUM_PAGES
    random: Random = field(default_factory=lambda: Random(3))
    allocator: PageAllocator = field(init=False)
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.num_pages, self.page_size)

    def add(self, sampling: Sampling, rule: str = "match", length: int = 1, room: int = 70, **spec: Any) -> Request:
        """Add a request with `length` committed tokens before the last."""
        text = [self.random.randrange(self.vocab_size) for _ in range(length)]
        request = make_request(
            len(self.requests), text[:1], sampling, 11 + len(self.requests), rule=RULES[rule], **spec
        )
        self.allocator.grow(request.pages, room)
        self.requests.append(request)
        return request

    @torch.inference_mode()
    def start(self, counts: Sequence[int]) -> None:
        """Commit a number of tokens of every request, as a prompt is."""
        paths = [list(range(n)) for n in counts]
        tokens = [[self.random.randrange(self.vocab_size) for _ in range(n)] for n in counts]
        self._commit(tuple(1 for _ in counts), tuple(0 for _ in counts), paths, tokens)

    @torch.inference_mode()
    def step(self, budgets: Sequence[int], stream: int = 0) -> TokenTree:
        """Draft with both, compare, and commit a part of the draft."""
        batch = Batch(tuple(self.requests), tuple(1 for _ in budgets), tuple(budgets), self.page_size, stream)
        tree, expected = (drafter.propose(batch) for drafter in (self.looping, self.reference))
        assert tree.tokens == expected.tokens
        assert tree.parents == expected.parents
        assert (tree.q is None) == (expected.q is None)
        if tree.q is not None:
            assert expected.q is not None
            torch.testing.assert_close(tree.q.cpu(), expected.q.cpu(), rtol=self.tolerance, atol=self.tolerance)
        paths, tokens = [], []
        for b in range(len(budgets)):
            path = self._choose_path(tree, b)
            paths.append(path)
            tokens.append([*(tree.tokens[b][node] for node in path[1:]), self.random.randrange(self.vocab_size)])
        self._commit(batch.num_new_tokens, batch.granted_nodes, paths, tokens)
        self._compare_pools()
        return tree

    def _choose_path(self, tree: TokenTree, b: int) -> list[int]:
        """Choose a path from the root, often to a leaf."""
        path = [0]
        while (below := [n for n, parent in enumerate(tree.parents[b]) if parent == path[-1]]) and (
            self.random.random() < 0.7
        ):
            path.append(self.random.choice(below))
        return path

    def _commit(
        self, new: Sequence[int], granted: Sequence[int], paths: list[list[int]], tokens: list[list[int]]
    ) -> None:
        batch = Batch(tuple(self.requests), tuple(new), tuple(granted), self.page_size)
        longest = max(map(len, paths))
        device = self.device if HAS_GPU else "cpu"  # a pretended GPU has no generator
        noise = torch.Generator(device).manual_seed(self.random.randrange(1 << 30))
        features = torch.randn(len(paths), longest, self.width, generator=noise, device=device, dtype=self.dtype)
        commit = Commit.from_lists(paths, tokens, features=features.to(self.device))
        for drafter in (self.looping, self.reference):
            drafter.observe(batch, commit)
        for request, path, following in zip(self.requests, paths, tokens, strict=True):
            request.output += following
            request.num_computed += len(path)

    def _compare_pools(self) -> None:
        """Compare the KV of both, and look for a write to the null page."""
        for mine, theirs in zip(_list_kv(self.looping), _list_kv(self.reference), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=self.tolerance, atol=self.tolerance, equal_nan=True)
            assert not mine[: self.page_size].any()


def _list_kv(drafter: Any) -> list[Tensor]:
    pool = get_pool(drafter)
    return [] if pool is None else [x.cpu() for pair in pool.layers.values() for x in pair]
