"""Count what the host does for a draft: operators that it launches, copies to the GPU, and waits for it.

Usage: PYTHONPATH=src:. python dev/gpu/count_draft_work.py

It needs no GPU: it counts the operators of one proposal for four requests on the pretended GPU of the tests, level by
level and with recordings. A CUDA graph replays all operators of a recording by one launch. The heads have one layer.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foredraft.kernels.gpu.graphs import CallingRecorder, CallingReplay, GraphMemory
from foredraft.models.hf import HFModel
from foredraft.request import Batch
from foredraft.sampling.params import Sampling
from tests.support import tiny_models
from tests.support.draft_loops import PAGE_SIZE, get_pool
from tests.support.loop_heads import make_twins
from tests.support.no_waits import wrap_kernels
from tests.support.pretend_gpu import DEVICE, PretendTensor, pretend_gpu

aten = torch.ops.aten
COPIES = (aten._to_copy, aten.to, aten.copy_)
DEPTH, NUM_REQUESTS = 6, 4
GREEDY, SAMPLED = (Sampling(max_tokens=200, temperature=t, ignore_eos=True) for t in (0, 1))
CHAIN: Mapping[str, Any] = {}
TREE = {"tree_nodes": 24, "top_k": 4}
CASES = [
    ("eagle3", "chain", CHAIN, GREEDY),
    ("eagle3", "dynamic tree", TREE, GREEDY),
    ("eagle3", "dynamic tree", TREE, SAMPLED),
    ("draft_model", "chain", CHAIN, GREEDY),
    ("mlp_speculator", "chain", CHAIN, GREEDY),
    ("hydra", "chain", CHAIN, GREEDY),
    ("medusa", "tree", {"tree_nodes": 24}, GREEDY),
    ("medusa", "tree", {"tree_nodes": 24}, SAMPLED),
]


@dataclass
class WorkCounter(TorchDispatchMode):
    """Counts of operators on the GPU, and of copies between it and the host."""

    launches: int = 0
    uploads: int = 0
    waits: int = 0
    is_paused: bool = field(default=False)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        packet = getattr(func, "overloadpacket", func)
        inputs = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        reads, writes = (any(isinstance(x, PretendTensor) for x in tensors) for tensors in (inputs, outputs))
        if packet in (aten._local_scalar_dense, aten.item) or (packet in COPIES and reads and not writes):
            self.waits += reads
        elif packet in COPIES and writes and not all(isinstance(x, PretendTensor) for x in inputs):
            self.uploads += 1
        elif writes and not func.is_view and packet not in (aten.detach, aten.lift_fresh):
            self.launches += 1
        return result


@dataclass
class MethodCounter(TorchFunctionMode):
    """Counts of transfers that the pretended GPU answers before operators are dispatched."""

    counter: WorkCounter

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counter = self.counter
        before = counter.waits, counter.uploads
        result = func(*args, **(kwargs or {}))
        if not counter.is_paused and before == (counter.waits, counter.uploads):
            counter.waits += func is Tensor.tolist and isinstance(args[0], PretendTensor)
            is_upload = func is Tensor.copy_ and isinstance(args[0], PretendTensor)
            counter.uploads += is_upload and not isinstance(args[1], PretendTensor)
        return result


@dataclass
class PausingRecorder(CallingRecorder):
    """Recorder whose replays count as one launch."""

    counter: WorkCounter

    def record(self, run: Any) -> CallingReplay:
        def run_as_one() -> Any:
            self.counter.launches += 1
            self.counter.is_paused = True
            try:
                return run()
            finally:
                self.counter.is_paused = False

        return super().record(run_as_one)


def count(title: str, options: Mapping[str, Any], sampling: Sampling, num_requests: int) -> tuple[WorkCounter, ...]:
    """Count the work of a proposal with the loop, and without."""
    counters = WorkCounter(), WorkCounter()
    target = HFModel.wrap_model(tiny_models.move_copy(tiny_models.target(), DEVICE), "tiny")
    how = {"recorder": PausingRecorder(counters[0]), "kernels": wrap_kernels()}
    twins = make_twins(title, DEPTH, options, target, **how)
    pool = get_pool(twins.looping)
    if pool is not None:
        pool.graph_memory = GraphMemory(1 << 30)  # records the pass before the loop too
    for _ in range(num_requests):
        twins.add(sampling, "reject", room=60)
    twins.start([9] * num_requests)
    budget = twins.looping.spec.max_nodes
    twins.step([budget] * num_requests)  # makes the recording
    batch = Batch(tuple(twins.requests), (1,) * num_requests, (budget,) * num_requests, PAGE_SIZE)
    for drafter, counter in zip((twins.looping, twins.reference), counters, strict=True):
        with ExitStack() as stack, torch.inference_mode():
            # a kernel is one launch, whatever its stand-in does
            pool = get_pool(drafter)
            if pool is not None:
                stack.enter_context(mock.patch.object(pool, "kernels", _count_kernels(pool.kernels, counter)))
            counter.launches = 0
            with counter, MethodCounter(counter):
                drafter.propose(batch)
    return counters


def _count_kernels(kernels: Any, counter: WorkCounter) -> Any:
    def wrap(run: Any) -> Any:
        def run_as_one(*args: Any) -> Any:
            before = counter.is_paused
            counter.launches += not before
            counter.is_paused = True
            try:
                return run(*args)
            finally:
                counter.is_paused = before

        return run_as_one

    made = object.__new__(type(kernels))
    vars(made).update(vars(kernels) | {"attend": wrap(kernels.attend), "store": wrap(kernels.store)})
    return made


def main() -> None:
    print("| drafter | draft | launches | copies to the GPU | waits | with the loop: launches | copies | waits |")
    print("|---|---|---|---|---|---|---|---|")
    with pretend_gpu():
        for title, shape, options, sampling in CASES:
            kind = "greedy" if sampling.is_greedy else "sampled, `reject`"
            loop, levels = count(title, options, sampling, NUM_REQUESTS)
            figures = [x for c in (levels, loop) for x in (c.launches, c.uploads, c.waits)]
            print("|", " | ".join([title, f"{shape}, {kind}", *map(str, figures)]), "|", flush=True)


if __name__ == "__main__":
    main()
