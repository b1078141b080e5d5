"""Peer for vLLM on CPU.

The drafter of an engine is fixed, so every mode needs its own engine and its own process.
"""

import os
import time
from typing import Any

from serve import serve

# The engine runs in this process, so that stopping the process stops the whole engine.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

# Metrics of vLLM: number of drafts, number of accepted draft tokens.
COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


class VllmPeer:
    """One compiled engine. Prefix caching is off, because some prompts are sent more than once."""

    engine: Any
    sampling_params_class: Any
    is_counting: bool

    def load(
        self, model: str, draft: str | None, dtype: str, threads: int, context: int, mode: str, draft_tokens: int,
        lookup: list[int], max_streams: int, **_: Any,
    ) -> dict[str, Any]:  # fmt: skip
        os.environ["OMP_NUM_THREADS"] = str(threads)
        cores = sorted(os.sched_getaffinity(0))
        if threads <= len(cores):
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores[:threads])
        import vllm

        spec = {
            "plain": None,
            "ngram": {"method": "ngram", "num_speculative_tokens": lookup[0], "prompt_lookup_max": lookup[1],
                      "prompt_lookup_min": 1},
            "draft": {"method": "draft_model", "model": draft, "num_speculative_tokens": draft_tokens},
        }[mode]  # fmt: skip
        if mode == "draft" and draft is None:
            raise ValueError("this mode needs a draft model")
        self.sampling_params_class, self.is_counting = vllm.SamplingParams, spec is not None
        self.engine = vllm.LLM(
            model=model, dtype=dtype, max_model_len=context, enable_prefix_caching=False,
            max_num_seqs=max_streams if mode == "plain" else 1, disable_log_stats=not self.is_counting,
            **({"speculative_config": spec} if spec else {}),
        )  # fmt: skip
        return {"version": f"vllm {vllm.__version__}"}

    def generate(self, prompt: list[int], max_tokens: int, **_: Any) -> dict[str, Any]:
        params = self.sampling_params_class(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        before = self._read_counters()
        start = time.perf_counter()
        (output,) = self.engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = list(output.outputs[0].token_ids)
        after = self._read_counters()
        drafts, accepted = (after[name] - before[name] for name in COUNTERS)
        # Both terms are lower bounds of the passes. tokens - accepted is too low if tokens beyond max_tokens were
        # accepted; 1 + drafts is too low if a pass had no draft.
        return {"tokens": tokens, "seconds": seconds, "passes": max(len(tokens) - accepted, 1 + drafts)}

    def decode_streams(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        params = self.sampling_params_class(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self.engine.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "seconds": seconds}

    def _read_counters(self) -> dict[str, int]:
        counts = dict.fromkeys(COUNTERS, 0)
        if self.is_counting:
            counts |= {m.name: m.value for m in self.engine.get_metrics() if m.name in COUNTERS}
        return counts


if __name__ == "__main__":
    peer = VllmPeer()
    serve({"load": peer.load, "generate": peer.generate, "streams": peer.decode_streams})
