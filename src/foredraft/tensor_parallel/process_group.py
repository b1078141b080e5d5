"""The process group of torch.distributed that the ranks of one model form."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

LOOPBACK = "lo"  # network interface of this machine alone
# Read by gloo and NCCL when they open their sockets.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Without it, torch's own thread ends the whole program when a collective fails. `RankProcesses` watches the ranks.
_OWN_ERROR_HANDLING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


@contextmanager
def form_group(rank: int, size: int, device: torch.device, store: str) -> Iterator[None]:
    """Join the default process group of torch, and set the environment in which transformers loads a part of a model.

    Args:
        rank: number of this process.
        size: number of processes.
        device: device of this process.
        store: path of a new file, by which the processes find each other.
    """
    variables = {"LOCAL_RANK": str(rank)} | _OWN_ERROR_HANDLING  # transformers reads the rank
    if LOOPBACK in {name for _, name in socket.if_nameindex()}:
        variables |= dict.fromkeys(_INTERFACE_VARIABLES, LOOPBACK)
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    is_gpu = device.type == "cuda"
    try:
        if is_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            device_id=device if is_gpu else None,
        )
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def interrupt_collectives() -> None:
    """End collectives that wait for a process that has ended. Those of gloo end by themselves."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


def leave_group() -> None:
    """Leave the process group, without waiting for its other processes."""
    interrupt_collectives()
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_device(device: torch.device) -> None:
    """Wait for what the device computes, so that the loss of a process is noticed before a result is used."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
