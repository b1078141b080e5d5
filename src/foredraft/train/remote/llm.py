"""LLM of a target that runs on a server: drafters are made here, completions come by HTTP."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from foredraft.llm import LLM
from foredraft.models.loading import load_tokenizer
from foredraft.models.prompts import Prompt
from foredraft.outputs import Completion
from foredraft.request_options import RequestOptions
from foredraft.sampling.params import Sampling
from foredraft.train.prompts import get_ids
from foredraft.train.remote.server import TargetServer
from foredraft.train.remote.target import RemoteTarget

NUM_REQUESTS = 32  # completions that are requested at the same time


class RemoteLLM(LLM):
    """LLM whose target runs on a server.

    Args:
        model: built-in target, folder or hub id; its tables and its tokenizer are read.
        server: server that runs the target.
        dtype: dtype of the tables; "auto" = as stored.
        device: device of the trainer.
    """

    def __init__(self, model: str, server: TargetServer, dtype: str | torch.dtype, device: torch.device) -> None:
        target = RemoteTarget.load(model, dtype, device, server)
        tokenizer = load_tokenizer(target.name, target.vocab_size)
        super().__init__(target, None, tokenizer=tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
    ) -> list[Completion]:
        """Generate a completion of every prompt on the server.

        Args:
            prompts: token ids of every prompt.
            sampling: one per prompt; temperature, seed and max_tokens are used.
            options: must be None.
        """
        assert options is None
        assert isinstance(prompts, Sequence)
        assert isinstance(sampling, Sequence)
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            return list(pool.map(self._complete, prompts, sampling))

    def _complete(self, prompt: Any, sampling: Sampling) -> Completion:
        assert isinstance(self.target, RemoteTarget)
        return self.target.server.complete(get_ids(prompt), sampling)
