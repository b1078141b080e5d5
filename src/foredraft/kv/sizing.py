"""Sizes of the KV memory, from the user's limits or from the free memory."""

import os
from dataclasses import dataclass

import torch

from foredraft.errors import ForedraftError
from foredraft.kv.control_group import read_memory_room

# Shares of the free memory that are used by default. The rest of a GPU is for activations. The memory of a CPU, or of a
# device that shares it, has other users.
DEFAULT_SHARE, GPU_SHARE = 0.25, 0.8
MIN_BYTES_PER_TOKEN = 16  # for the tables of pages, if a model has no attention and so no KV
MAX_SIZED_CONTEXT = 1 << 20  # tokens; a longer context is not reserved in full by default


@dataclass(frozen=True)
class MemoryLimits:
    """Sizes of the KV memory and of a step.

    `kv_tokens` goes before `kv_memory`. If both are None, the KV memory holds a full batch at full context, but takes
    at most `DEFAULT_SHARE` of the free memory, on a GPU `GPU_SHARE`, times `kv_share`.
    """

    kv_tokens: int | None = None  # KV memory in tokens
    page_size: int = 16  # tokens per page
    max_batch: int = 32  # requests per step
    max_step_tokens: int = 2048  # rows of one forward pass of the target
    kv_memory: int | None = None  # KV memory of target and drafter together, in bytes
    kv_share: float = 1.0  # share of the default KV memory, for one of several models; above 0, at most 1
    prefix_cache: bool = True  # share pages of equal prefixes; False = only among the samples of one prompt

    def get_memory(self, device: torch.device) -> int:
        """Return the memory of KV and recurrent states in bytes; `kv_tokens` may limit it further."""
        if self.kv_memory is not None:
            return self.kv_memory
        share = GPU_SHARE if device.type == "cuda" else DEFAULT_SHARE
        return int(get_available_memory(device) * share * self.kv_share)

    def num_pages(self, context_length: int, bytes_per_token: int, device: torch.device, state_bytes: int = 0) -> int:
        """Return the number of pages, the null page included.

        Args:
            context_length: longest sequence in tokens.
            bytes_per_token: KV of target and drafter together.
            device: device of the KV memory.
            state_bytes: memory for recurrent states, which is not there for KV. Default 0.

        Raises:
            ForedraftError: if the limits hold less than one page.
        """
        size, bytes_per_token = self.page_size, max(bytes_per_token, MIN_BYTES_PER_TOKEN)
        if self.kv_tokens is not None:
            if self.kv_tokens < size:
                raise ForedraftError(f"kv_tokens must hold at least one page of {size} tokens, got {self.kv_tokens}")
            return self.kv_tokens // size + 1
        if self.kv_memory is not None:
            tokens = (self.kv_memory - state_bytes) // bytes_per_token
            if tokens < size:
                states = f" and {state_bytes} bytes of recurrent states" if state_bytes else ""
                raise ForedraftError(
                    f"kv_memory of {self.kv_memory} bytes holds no page of {size} tokens{states}; give at least "
                    f"{size * bytes_per_token + state_bytes} ({bytes_per_token} bytes a token, the drafter's included)"
                )
            return tokens // size + 1
        full_batch = self.max_batch * min(context_length, MAX_SIZED_CONTEXT)
        fits = max(self.get_memory(device) - state_bytes, 0) // bytes_per_token
        return max(min(full_batch, fits) // size, 2) + 1


def get_available_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes; for a CPU that of the machine, or of a container with a limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    room = read_memory_room()
    return free if room is None else min(free, room)
