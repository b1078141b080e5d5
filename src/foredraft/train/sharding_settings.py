"""Settings of fully sharded data parallelism (FSDP2), as `accelerate launch --use_fsdp` gives them."""

import os
from dataclasses import dataclass

from foredraft.errors import ForedraftError

IS_USED = "ACCELERATE_USE_FSDP"  # environment variable of accelerate


@dataclass(frozen=True)
class ShardingSettings:
    """How the processes share the weights.

    Attributes:
        frees_after_forward: gathered weights are freed after the forward pass, and gathered again for the backward one.
    """

    frees_after_forward: bool = True

    @classmethod
    def detect(cls, num_processes: int) -> "ShardingSettings | None":
        """Read the settings from the environment of the launcher; None if nothing is sharded.

        Args:
            num_processes: processes of the run. A single one has all weights.

        Raises:
            ForedraftError: the launcher asks for something that is not supported.
        """
        if os.environ.get(IS_USED, "false").lower() not in ("true", "1") or num_processes == 1:
            return None
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import CPUOffloadPolicy

        plugin = FullyShardedDataParallelPlugin()
        if plugin.fsdp_version != 2:
            raise ForedraftError("weights are sharded by FSDP2 only; launch with --fsdp_version 2")
        if plugin.activation_checkpointing:
            raise ForedraftError(
                "activation checkpointing is not supported; launch without --fsdp_activation_checkpointing, and give "
                "--parts to use less memory"
            )
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            raise ForedraftError("weights in CPU memory are not supported; launch without --fsdp_offload_params")
        return cls(bool(plugin.reshard_after_forward))
