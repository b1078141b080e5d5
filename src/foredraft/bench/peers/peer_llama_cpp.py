"""llama.cpp through llama-cpp-python's C interface: plain decoding, prompt lookup, a draft model.

The loops are those of llama.cpp's own examples (simple, lookup, speculative-simple), on the C functions: the high-level
class copies every row of logits, which would slow llama.cpp's speculation down.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp as c
import numpy as np
from gguf_from_hf import convert
from serve import draft_by_lookup, measure_verify_costs, serve

FILE_TYPES = {"int8": c.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": c.LLAMA_FTYPE_MOSTLY_Q4_0}


# llama.cpp says a page about every model; the callback has to live as long as the library uses it
SILENT_LOG_CALLBACK = c.llama_log_callback(lambda level, text, data: None)


class LlamaContext:
    """A model with its KV memory: the first `length` tokens of one text."""

    def __init__(self, file: Path, threads: int, size: int) -> None:
        self.model = c.llama_model_load_from_file(str(file).encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch = size, size
        params.n_threads = params.n_threads_batch = threads
        self.context = self.model and c.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not load {file.name}")
        self.kv_memory = c.llama_get_memory(self.context)
        self.vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.batch = c.llama_batch_init(size, 0, 1)
        self.length = 0

    def decode(self, tokens: Sequence[int], all_rows: bool = False) -> list[int]:
        """Append tokens; the likeliest next token after the last of them, or after every one."""
        batch, count = self.batch, len(tokens)
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self.length + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = all_rows or i == count - 1
        code = c.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode failed with code {code}")
        self.length += count
        return [self._find_argmax(i) for i in (range(count) if all_rows else (count - 1,))]

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        if length < self.length:
            c.llama_memory_seq_rm(self.kv_memory, 0, length, -1)
            self.length = length

    def _find_argmax(self, row: int) -> int:
        logits = c.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


class LlamaCppPeer:
    target: LlamaContext
    draft: LlamaContext | None = None

    def load(
        self, model: str, draft: str | None, dtype: str, threads: int, context: int, scratch: str,
        quantization: str | None, **_: Any,
    ) -> dict[str, Any]:  # fmt: skip
        c.llama_log_set(SILENT_LOG_CALLBACK, ctypes.c_void_p(0))
        c.llama_backend_init()
        folder = Path(scratch)
        target = _convert_cached(Path(model), folder / "target.gguf", dtype)
        if quantization is not None:
            target = _quantize_cached(target, folder / f"target-{quantization}.gguf", FILE_TYPES[quantization])
        self.target = LlamaContext(target, threads, context)
        if draft is not None:
            self.draft = LlamaContext(_convert_cached(Path(draft), folder / "draft.gguf", dtype), threads, context)
        return {"version": f"llama-cpp-python {c.__version__} ({_read_build_features()})"}

    def generate(
        self, mode: str, prompt: list[int], max_tokens: int, draft_tokens: int, lookup: list[int]
    ) -> dict[str, Any]:
        propose: Callable[[list[int], int], list[int]] = {
            "plain": lambda tokens, room: [],
            "prompt_lookup": lambda tokens, room: draft_by_lookup(tokens, min(lookup[0], room), lookup[1]),
            "draft": lambda tokens, room: self._draft_tokens(tokens, min(draft_tokens, room)),
        }[mode]
        if mode == "draft" and self.draft is None:
            raise ValueError("this mode needs a draft model")
        for context in (self.target, self.draft):
            if context is not None:
                context.truncate(0)
        began = time.perf_counter()
        tokens = [*prompt, *self.target.decode(prompt)]
        passes, end = 1, len(prompt) + max_tokens
        while len(tokens) < end:
            drafted = propose(tokens, end - len(tokens) - 1)
            chosen = self.target.decode([tokens[-1], *drafted], all_rows=bool(drafted))
            passes += 1
            kept = 0
            while kept < len(drafted) and drafted[kept] == chosen[kept]:
                kept += 1
            self.target.truncate(len(tokens) + kept)
            if self.draft is not None:
                self.draft.truncate(len(tokens) + kept)
            tokens += chosen[: kept + 1]
        return {"tokens": tokens[len(prompt) :], "seconds": time.perf_counter() - began, "passes": passes}

    def verify(self, rows: list[int], context: list[int], repeats: int) -> dict[str, Any]:
        self.target.truncate(0)
        self.target.decode(context)
        costs: dict[str, Any] = measure_verify_costs(
            rows,
            repeats,
            lambda count: self.target.decode(context[:count], all_rows=True),
            lambda count: self.target.truncate(len(context)),
        )
        return costs

    def _draft_tokens(self, tokens: list[int], count: int) -> list[int]:
        assert self.draft is not None
        drafted: list[int] = []
        fresh = tokens[self.draft.length :]
        while len(drafted) < count:
            fresh = self.draft.decode(fresh)
            drafted += fresh
        return drafted


def _convert_cached(folder: Path, out: Path, dtype: str) -> Path:
    if not out.exists():
        convert(folder, out, dtype)
    return out


def _quantize_cached(file: Path, out: Path, kind: int) -> Path:
    params = c.llama_model_quantize_default_params()
    params.ftype = kind
    if not out.exists() and c.llama_model_quantize(str(file).encode(), str(out).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not quantise to {out.name}")
    return out


def _read_build_features() -> str:
    """Return the build features that decide the speed."""
    pairs = c.llama_print_system_info().decode().replace("CPU :", "").split("|")
    names = [pair.split("=")[0].strip() for pair in pairs if pair.strip().endswith("= 1")]
    return " ".join(name for name in names if name in ("AVX2", "AVX512", "AVX512_BF16", "AMX_INT8", "OPENMP", "REPACK"))


if __name__ == "__main__":
    peer = LlamaCppPeer()
    serve({"load": peer.load, "generate": peer.generate, "verify": peer.verify})
