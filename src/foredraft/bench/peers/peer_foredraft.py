"""Foredraft as a peer: a separate process with the same protocol as the other programs."""

import os
import time
from dataclasses import asdict
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from serve import serve

from foredraft import __version__
from foredraft.bench import pass_limits, verify_cost
from foredraft.llm import LLM, MemoryLimits
from foredraft.sampling.params import Sampling


class ForedraftPeer:
    """One target with plain decoding and all requested drafters."""

    plain: LLM
    modes: dict[str, LLM]  # mode -> LLM on the same weights

    def load(
        self, model: str, dtype: str, threads: int, drafters: dict[str, dict[str, Any]], settings: dict[str, Any],
        max_streams: int = 1, **_: Any,
    ) -> dict[str, Any]:  # fmt: skip
        torch.set_num_threads(threads)
        limits = MemoryLimits(max_batch=max(MemoryLimits.max_batch, max_streams))
        self.plain = LLM(model, None, dtype=dtype, device="cpu", limits=limits, **settings)
        self.modes = {"plain": self.plain}
        self.modes |= {name: self.plain.with_drafter(spec) for name, spec in drafters.items()}
        return {"version": f"foredraft {__version__}, torch {torch.__version__}"}

    def generate(self, mode: str, prompt: list[int], max_tokens: int, **_: Any) -> dict[str, Any]:
        sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        (completion,) = self.modes[mode].generate([prompt], sampling)
        seconds = time.perf_counter() - start
        if completion.error is not None:
            raise RuntimeError(completion.error)
        return {"tokens": completion.token_ids, "seconds": seconds, "passes": completion.stats.target_passes}

    def decode_streams(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        completions = self.plain.generate(prompts, sampling)
        seconds = time.perf_counter() - start
        for completion in completions:
            if completion.error is not None:
                raise RuntimeError(completion.error)
        return {"tokens": [completion.token_ids for completion in completions], "seconds": seconds}

    def limits(self) -> dict[str, Any]:
        return asdict(pass_limits.measure_limits(self.plain.target, self.plain.target.model.dtype))

    def verify(self, rows: list[int], context: list[int], repeats: int) -> dict[str, Any]:
        costs = verify_cost.measure_costs(self.plain, rows, len(context), repeats)
        return {"seconds": {str(cost.rows): cost.seconds for cost in costs}}


if __name__ == "__main__":
    peer = ForedraftPeer()
    serve(
        {
            "load": peer.load,
            "generate": peer.generate,
            "verify": peer.verify,
            "streams": peer.decode_streams,
            "limits": peer.limits,
        }
    )
