"""The process group of torch.distributed that the ranks of one model form."""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

WAIT_SECONDS = 60.0  # longest wait of a collective for the other ranks, which run the same pass at the same time
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


def limit_waits() -> None:
    """Let collectives of gloo fail after WAIT_SECONDS.

    gloo notices the end of another process at once, but about one in 700 times it forgets an operation whose write
    fails then. That operation waits for the timeout, which is half an hour unless set.
    """
    if dist.get_backend() == "gloo":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=WAIT_SECONDS))  # torch has no public way


def interrupt_collectives() -> None:
    """End collectives of NCCL that wait for a process that has ended. Those of gloo end by themselves."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


def leave_group() -> None:
    """Leave the process group, without waiting for its other processes."""
    interrupt_collectives()
    if dist.is_initialized():
        dist.destroy_process_group()
    release_groups_of_meshes()


def release_groups_of_meshes() -> None:
    """Release the process groups that meshes hold, so that their threads and connections end.

    The caches of sharded tensors keep meshes until the program ends or another model is loaded, and the threads of a
    group end with its last reference. Sharded modules are in cycles, and hold groups too.
    """
    gc.collect()
    for mesh in [found for found in gc.get_objects() if type(found) is DeviceMesh]:
        vars(mesh).get("_pg_registry", {}).clear()  # torch has no public way


def wait_for_device(device: torch.device) -> None:
    """Wait for what the device computes, so that the loss of a process is noticed before a result is used."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
