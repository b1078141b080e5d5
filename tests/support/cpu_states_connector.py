"""vLLM's ExampleHiddenStatesConnector on CPU.

It copies states by pinned memory and CUDA events. PyTorch without an accelerator refuses pinned memory, and the events
that vLLM's CPU worker puts in their place have no `query`. Both are replaced here; all else is vLLM's own.
"""

from functools import partial
from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllm_connector


class ExampleHiddenStatesConnector(vllm_connector.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """The connector, under the name that the command has."""

    def _submit_async_write(self, pending: Any) -> None:
        torch.cuda.Event.query = lambda event: True  # type: ignore[method-assign]
        with mock.patch.object(torch, "empty_like", partial(_make_pageable, torch.empty_like)):
            super()._submit_async_write(pending)


def _make_pageable(empty_like: Any, tensor: torch.Tensor, device: str, pin_memory: bool) -> torch.Tensor:
    assert pin_memory
    return empty_like(tensor, device=device)  # type: ignore[no-any-return]
