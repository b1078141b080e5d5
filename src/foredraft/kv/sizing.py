"""How many pages there are: sized from what the user gave, or from the memory that is free."""

import os
from dataclasses import dataclass

import torch

from foredraft.errors import ForedraftError


@dataclass(frozen=True)
class MemoryLimits:
    """Sizes of the KV memory and of a step.

    kv_tokens: tokens it holds; else kv_memory: bytes for the KV of target and drafter together; else what fits a
    quarter of the free memory. prefix_cache: requests find again what others computed; False = only the samples of one
    prompt share its pages.
    """

    kv_tokens: int | None = None
    page_size: int = 16
    max_batch: int = 32
    max_step_tokens: int = 2048
    kv_memory: int | None = None
    prefix_cache: bool = True

    def num_pages(self, context_length: int, bytes_per_token: int, device: torch.device) -> int:
        """Pages with the null page. By default those of every request of a full batch at full context, if they fit.

        bytes_per_token: of target and drafter together. Raises ForedraftError for less than a page.
        """
        size = self.page_size
        if self.kv_tokens is not None:
            if self.kv_tokens < size:
                raise ForedraftError(f"kv_tokens must hold at least one page of {size} tokens, got {self.kv_tokens}")
            return self.kv_tokens // size + 1
        if self.kv_memory is not None:
            tokens = self.kv_memory // bytes_per_token
            if tokens < size:
                raise ForedraftError(
                    f"kv_memory of {self.kv_memory} bytes holds no page of {size} tokens; "
                    f"give at least {size * bytes_per_token} ({bytes_per_token} bytes a token, the drafter's included)"
                )
            return tokens // size + 1
        most = self.max_batch * min(context_length, 1 << 20)
        fits = free_memory(device) // 4 // bytes_per_token
        return max(min(most, fits) // size, 2) + 1


def free_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
