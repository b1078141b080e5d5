"""Placement of the trained weights: whole in every process, or sharded over all of them by FSDP2."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from foredraft.drafters.losses import Losses, Trace
from foredraft.train.distributed import DistributedContext
from foredraft.train.sharded_tensors import use_whole_parameters
from foredraft.train.sharding_settings import ShardingSettings

ComputeLoss = Callable[[Trace, float], Losses]  # from a trace and the share of the run that is done


class WeightPlacement(Protocol):
    """Placement of the trained weights, and the sum of their gradients."""

    @property
    def is_sharded(self) -> bool:
        """Whether every process must take part in whatever uses the weights."""

    def compute_loss(self, trace: Trace, progress: float) -> Losses:
        """Compute the loss of one pass."""

    def sum_gradient(self, gradient: Tensor) -> None:
        """Replace the gradient of this process by the sum over all processes, in place."""

    def gather(self) -> contextlib.AbstractContextManager[None]:
        """Have whole weights in every process. They may be read, not changed."""


@dataclass(frozen=True)
class ReplicatedWeights:
    """Whole weights in every process."""

    distributed: DistributedContext
    loss: ComputeLoss
    is_sharded: bool = False

    def compute_loss(self, trace: Trace, progress: float) -> Losses:
        return self.loss(trace, progress)

    def sum_gradient(self, gradient: Tensor) -> None:
        self.distributed.all_reduce(gradient)

    def gather(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class LossModule(nn.Module):
    """Loss as a module, so that FSDP2 gathers the weights before it and sums the gradients after its backward pass.

    A drafter in training reads its weights wherever it likes, so they are gathered together.
    """

    def __init__(self, network: nn.Module, loss: ComputeLoss) -> None:
        super().__init__()
        self.network = network
        self.loss = loss

    def forward(self, trace: Trace, progress: float) -> tuple[Tensor, Mapping[str, float]]:
        """Compute the loss and its components. FSDP2 finds tensors in tuples, not in dataclasses."""
        losses = self.loss(trace, progress)
        # FSDP2 sums the gradients that exist, and the processes must agree on which: a head whose rows are all masked
        # in one process has none there.
        unused = sum(parameter.sum() for parameter in self.network.parameters() if parameter.requires_grad)
        return losses.total + 0 * unused, losses.components


@dataclass(frozen=True)
class ShardedWeights:
    """Weights of which every process has a part, with its gradients and the optimizer's moments."""

    module: Any  # LossModule that is an FSDPModule
    is_sharded: bool = True

    @classmethod
    def shard(
        cls, network: nn.Module, loss: ComputeLoss, distributed: DistributedContext, settings: ShardingSettings
    ) -> "ShardedWeights":
        """Shard the weights of a network that take gradients. Others stay whole.

        Args:
            network: network to train, with equal weights in every process.
            loss: loss of the network.
            distributed: processes of the run.
            settings: how the weights are shared.
        """
        module = LossModule(network, loss)
        frozen = {parameter for parameter in network.parameters() if not parameter.requires_grad}
        sharded = shard_module(module, make_mesh(distributed), settings, frozen)
        # The sum, not the mean: the learner divides by the number of tokens to learn. gloo has no other reduction.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        return cls(sharded)

    def compute_loss(self, trace: Trace, progress: float) -> Losses:
        return Losses(*self.module(trace, progress))

    def sum_gradient(self, gradient: Tensor) -> None:
        """Do nothing: the backward pass has summed it."""

    def gather(self) -> contextlib.AbstractContextManager[None]:
        # Not by `unshard`: a hook of FSDP2 shards the weights again as soon as a state_dict is made.
        return use_whole_parameters(self.module)


def make_mesh(distributed: DistributedContext) -> DeviceMesh:
    """Make the mesh of all processes."""
    return init_device_mesh(distributed.device.type, (distributed.num_processes,))


def shard_module(
    module: nn.Module, mesh: DeviceMesh, settings: ShardingSettings, ignored: set[nn.Parameter] | None = None
) -> FSDPModule:
    """Shard a module in place, as one unit. Returns the module.

    Args:
        module: module, on any device; its part goes to the device of the mesh.
        mesh: processes.
        settings: how the weights are shared.
        ignored: parameters that stay whole. Default None = none.
    """
    return fully_shard(module, mesh=mesh, reshard_after_forward=settings.frees_after_forward, ignored_params=ignored)
