"""Transformers as a peer: plain, assisted and prompt-lookup generation."""

import inspect
import os
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from serve import measure_verify_costs, serve


class TransformersPeer:
    """One model with an optional assistant."""

    model: Any
    assistant: Any = None

    def load(self, model: str, draft: str | None, dtype: str, threads: int, **_: Any) -> dict[str, Any]:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.model = _load_model(model, dtype)
        self.assistant = None if draft is None else _load_model(draft, dtype)
        return {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}

    @torch.inference_mode()
    def generate(
        self, mode: str, prompt: list[int], max_tokens: int, draft_tokens: int, lookup: list[int]
    ) -> dict[str, Any]:
        ids, passes = torch.tensor([prompt]), [0]
        extra: dict[str, Any] = {}
        if mode == "assisted":
            if self.assistant is None:
                raise ValueError("assisted generation needs a draft model")
            # A constant draft length, as in all other programs; without a threshold no draft is cut short.
            config = self.assistant.generation_config
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = draft_tokens, "constant"
            config.assistant_confidence_threshold = 0.0
            extra["assistant_model"] = self.assistant
        elif mode == "prompt_lookup":
            extra |= {"prompt_lookup_num_tokens": lookup[0], "max_matching_ngram_size": lookup[1]}
        hook = self.model.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
        start = time.perf_counter()
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, min_new_tokens=max_tokens,
            do_sample=False, pad_token_id=0, **extra,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        hook.remove()
        return {"tokens": output[0, len(prompt) :].tolist(), "seconds": seconds, "passes": passes[0]}

    @torch.inference_mode()
    def decode_streams(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, min_new_tokens=max_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        return {"tokens": output[:, ids.shape[1] :].tolist(), "seconds": time.perf_counter() - start}

    @torch.inference_mode()
    def verify(self, rows: list[int], context: list[int], repeats: int) -> dict[str, Any]:
        cache = transformers.DynamicCache(config=self.model.config)
        # the argument is past_key_values before transformers 5.24
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        self.model(torch.tensor([context]), **{name: cache}, logits_to_keep=1)
        windows = {count: torch.tensor([context[:count]]) for count in rows}
        costs: dict[str, Any] = measure_verify_costs(
            rows,
            repeats,
            lambda count: self.model(windows[count], **{name: cache}),
            lambda count: cache.crop(-count),
        )
        return costs


def _load_model(name: str, dtype: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False).eval()


if __name__ == "__main__":
    peer = TransformersPeer()
    serve({"load": peer.load, "generate": peer.generate, "verify": peer.verify, "streams": peer.decode_streams})
