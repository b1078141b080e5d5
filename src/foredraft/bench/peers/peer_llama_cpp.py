"""llama.cpp as a peer: plain decoding, prompt lookup and a draft model.

The loops follow the examples of llama.cpp (simple, lookup, speculative-simple) and call the C functions of
llama-cpp-python. Its high-level class copies every row of logits, which would slow speculation down.
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

# Value of --quantization -> file type of llama.cpp.
FILE_TYPES = {"int8": c.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": c.LLAMA_FTYPE_MOSTLY_Q4_0}

KV_CELLS = 256  # tokens by which llama.cpp enlarges the cache of a sequence
MAX_STREAM_BATCH = 2048  # tokens of a prompt batch with several sequences, as in llama-batched-bench

# Drops the long log that llama.cpp writes for every model. The callback must live as long as the library uses it.
SILENT_LOG_CALLBACK = c.llama_log_callback(lambda level, text, data: None)


def load_model(file: Path) -> Any:
    """Load the weights of a GGUF file."""
    model = c.llama_model_load_from_file(str(file).encode(), c.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp could not load {file.name}")
    return model


class LlamaContext:
    """Model with a KV cache, for the first `length` tokens of one sequence or for several sequences.

    Args:
        model: weights, from `load_model`.
        threads: threads of a pass.
        size: tokens of the KV cache, of all sequences together.
        sequences: number of sequences. Default 1.
    """

    def __init__(self, model: Any, threads: int, size: int, sequences: int = 1) -> None:
        self.batch_size = min(size, MAX_STREAM_BATCH) if sequences > 1 else size
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = size, self.batch_size, sequences
        params.n_threads = params.n_threads_batch = threads
        self.context = c.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no memory for {size} tokens")
        self.kv_memory = c.llama_get_memory(self.context)
        self.vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
        self.batch = c.llama_batch_init(self.batch_size, 0, 1)
        self.length = 0

    def decode(self, tokens: Sequence[int], all_rows: bool = False) -> list[int]:
        """Append tokens and return the likeliest next token after the last one, or after each one if `all_rows`."""
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

    def decode_streams(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Decode `max_tokens` tokens after every prompt, one sequence each, all sequences in one batch."""
        entries = [(s, i, t, i == len(p) - 1) for s, p in enumerate(prompts) for i, t in enumerate(p)]
        next_tokens: list[int] = []
        for begin in range(0, len(entries), self.batch_size):
            next_tokens += self._decode_entries(entries[begin : begin + self.batch_size])
        outputs = [[token] for token in next_tokens]
        for step in range(max_tokens - 1):
            entries = [(s, len(p) + step, outputs[s][-1], True) for s, p in enumerate(prompts)]
            for output, token in zip(outputs, self._decode_entries(entries), strict=True):
                output.append(token)
        return outputs

    def _decode_entries(self, entries: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Decode entries of (sequence, position, token, whether its next token is returned)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (sequence, position, token, has_logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, has_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = c.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode failed with code {code}")
        num_rows = sum(has_logits for _, _, _, has_logits in entries)
        if not num_rows:
            return []
        rows = np.ctypeslib.as_array(c.llama_get_logits(self.context), shape=(num_rows, self.vocab_size))
        return [int(token) for token in rows.argmax(axis=1)]

    def close(self) -> None:
        """Free the KV cache; the model stays."""
        c.llama_batch_free(self.batch)
        c.llama_free(self.context)

    def truncate(self, length: int) -> None:
        """Drop all tokens from position `length` on."""
        if length < self.length:
            c.llama_memory_seq_rm(self.kv_memory, 0, length, -1)
            self.length = length

    def _find_argmax(self, row: int) -> int:
        logits = c.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


class LlamaCppPeer:
    """Target and optional draft model in llama.cpp."""

    model: Any
    threads: int
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
        self.model, self.threads = load_model(target), threads
        self.target = LlamaContext(self.model, threads, context)
        if draft is not None:
            draft_model = load_model(_convert_cached(Path(draft), folder / "draft.gguf", dtype))
            self.draft = LlamaContext(draft_model, threads, context)
        return {"version": f"llama-cpp-python {c.__version__} ({_read_build_features()})"}

    def generate(
        self, mode: str, prompt: list[int], max_tokens: int, draft_tokens: int, lookup: list[int]
    ) -> dict[str, Any]:
        propose: Callable[[list[int], int], list[int]] = {
            "plain": lambda tokens, budget: [],
            "prompt_lookup": lambda tokens, budget: draft_by_lookup(tokens, min(lookup[0], budget), lookup[1]),
            "draft": lambda tokens, budget: self._draft_tokens(tokens, min(draft_tokens, budget)),
        }[mode]
        if mode == "draft" and self.draft is None:
            raise ValueError("this mode needs a draft model")
        for context in (self.target, self.draft):
            if context is not None:
                context.truncate(0)
        start = time.perf_counter()
        tokens = [*prompt, *self.target.decode(prompt)]
        passes, end = 1, len(prompt) + max_tokens
        while len(tokens) < end:
            draft = propose(tokens, end - len(tokens) - 1)
            target_tokens = self.target.decode([tokens[-1], *draft], all_rows=bool(draft))
            passes += 1
            num_accepted = 0
            while num_accepted < len(draft) and draft[num_accepted] == target_tokens[num_accepted]:
                num_accepted += 1
            self.target.truncate(len(tokens) + num_accepted)
            if self.draft is not None:
                self.draft.truncate(len(tokens) + num_accepted)
            tokens += target_tokens[: num_accepted + 1]
        return {"tokens": tokens[len(prompt) :], "seconds": time.perf_counter() - start, "passes": passes}

    def decode_streams(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        # every sequence gets an equal part of the cache, which llama.cpp rounds up to 256 tokens
        length = -(-(len(prompts[0]) + max_tokens) // KV_CELLS) * KV_CELLS
        context = LlamaContext(self.model, self.threads, length * len(prompts), len(prompts))
        start = time.perf_counter()
        tokens = context.decode_streams(prompts, max_tokens)
        seconds = time.perf_counter() - start
        context.close()
        return {"tokens": tokens, "seconds": seconds}

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
        draft: list[int] = []
        new_tokens = tokens[self.draft.length :]
        while len(draft) < count:
            new_tokens = self.draft.decode(new_tokens)
            draft += new_tokens
        return draft


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
    serve({"load": peer.load, "generate": peer.generate, "verify": peer.verify, "streams": peer.decode_streams})
