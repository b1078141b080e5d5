"""Loading of a target over several processes."""

import torch

from foredraft.models.loading import build_model_on_meta
from foredraft.tensor_parallel.checks import check_architecture, check_process_group, choose_device
from foredraft.tensor_parallel.group import RankGroup
from foredraft.tensor_parallel.model import ParallelLM


def load_parallel_model(
    model: str, name: str, dtype: str | torch.dtype, device: str | torch.device, size: int
) -> ParallelLM:
    """Load a target, a part of it in each of `size` processes on this machine.

    Args:
        model: folder or hub id.
        name: name of the model in errors.
        dtype: dtype of the weights or its name; "auto" = as stored.
        device: "auto", "cpu" or "cuda". Rank r uses the GPU r.
        size: number of processes, this one included.

    Raises:
        ForedraftError: the model cannot be split like that, or cannot be loaded, or a process has failed.
    """
    check_process_group()
    first_device = choose_device(device, size)
    check_architecture(build_model_on_meta(model), name, size)
    group = RankGroup(size)
    return ParallelLM.from_part(group.load(model, name, dtype, first_device), group)
