"""vLLM on CPU: one engine, with or without a drafter; a mode is an engine, so every mode is a process of its own."""

import os
import time
from typing import Any

from serve import serve

# The engine in this very process, so that stopping the process stops all of it.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


class VllmPeer:
    """One engine, compiled; prefix caching is off, for a prompt is asked more than once."""

    engine: Any
    sampling_params_class: Any
    is_counting: bool

    def load(
        self, model: str, draft: str | None, dtype: str, threads: int, context: int, mode: str, draft_tokens: int,
        lookup: list[int], **_: Any,
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
            model=model, dtype=dtype, max_model_len=context, max_num_seqs=1, enable_prefix_caching=False,
            disable_log_stats=not self.is_counting, **({"speculative_config": spec} if spec else {}),
        )  # fmt: skip
        return {"version": f"vllm {vllm.__version__}"}

    def generate(self, prompt: list[int], max_tokens: int, **_: Any) -> dict[str, Any]:
        params = self.sampling_params_class(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        before = self._read_counters()
        began = time.perf_counter()
        (out,) = self.engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = list(out.outputs[0].token_ids)
        after = self._read_counters()
        drafts, accepted = (after[name] - before[name] for name in COUNTERS)
        # What is accepted beyond the last token wanted is counted too, so that tokens - accepted falls short of the
        # passes; a pass without a draft is not counted, so that the prompt's and the drafts' fall short as well.
        return {"tokens": tokens, "seconds": seconds, "passes": max(len(tokens) - accepted, 1 + drafts)}

    def _read_counters(self) -> dict[str, int]:
        counts = dict.fromkeys(COUNTERS, 0)
        if self.is_counting:
            counts |= {m.name: m.value for m in self.engine.get_metrics() if m.name in COUNTERS}
        return counts


if __name__ == "__main__":
    peer = VllmPeer()
    serve({"load": peer.load, "generate": peer.generate})
