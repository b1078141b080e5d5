"""SGLang. It needs CUDA."""

import json
from typing import Any

from foredraft.handover.engine import DrafterArguments, EngineDrafter, EngineTable
from foredraft.handover.server_flag import ServerFlag, no_flag

CALL_PARSERS = {
    "hermes": "qwen25", "llama3": "llama3", "mistral": "mistral", "mistral-args": "mistral", "harmony": "gpt-oss"
}  # fmt: skip
REASONING_PARSERS = {"think": "deepseek-r1", "harmony": "gpt-oss"}
DTYPES = frozenset({"auto", "half", "float16", "bfloat16", "float32"})
CHAIN_WIDTH = 1  # --speculative-eagle-topk of a chain


def write_drafter(drafter: EngineDrafter) -> DrafterArguments:
    """Return the flags of a drafter. One without a model has a number of draft tokens alone."""
    [name] = drafter.names
    flags: dict[str, Any] = {"--speculative-algorithm": name}
    if drafter.model is not None:
        flags |= {
            "--speculative-draft-model-path": drafter.model,
            "--speculative-num-steps": drafter.num_tokens,
            "--speculative-eagle-topk": CHAIN_WIDTH,
        }
    flags |= {"--speculative-num-draft-tokens": drafter.num_tokens + 1, **drafter.settings}  # the root counts
    return DrafterArguments(tuple(str(part) for item in flags.items() for part in item))


ENGINE = EngineTable(
    name="sglang",
    title="SGLang",
    version="0.5.23 (speculation: its sources), documentation of server arguments at 004813e",
    program=("python", "-m", "sglang.launch_server"),
    target_flag="--model-path",
    write_drafter=write_drafter,
    images={"cuda": "lmsysorg/sglang:v0.5.23"},
    entrypoint=("python3", "-m", "sglang.launch_server"),
    nearest="an EAGLE-3 head, which `foredraft train eagle3` makes, or --spec-method ngram without a model",
    api_key_flag="--api-key",
    flags={
        "served_model_name": ServerFlag("--served-model-name"),
        "chat_template": ServerFlag("--chat-template", is_folder=True),
        "tool_call_parser": ServerFlag("--tool-call-parser", values=frozenset(CALL_PARSERS), convert=CALL_PARSERS.get),
        "reasoning_parser": ServerFlag(
            "--reasoning-parser", values=frozenset(REASONING_PARSERS), convert=REASONING_PARSERS.get
        ),
        "revision": ServerFlag("--revision"),
        "tokenizer": ServerFlag("--tokenizer-path", is_folder=True),
        "dtype": ServerFlag("--dtype", values=DTYPES),
        "device": ServerFlag("--device", values=frozenset({"auto", "cuda"})),
        "max_model_len": ServerFlag("--context-length"),
        "max_batch": ServerFlag("--max-running-requests"),
        "max_step_tokens": ServerFlag(
            "--max-prefill-tokens", "it bounds the prompts of a step alone, not last tokens and drafts"
        ),
        "max_chunk": ServerFlag("--chunked-prefill-size"),
        "no_prefix_cache": ServerFlag("--disable-radix-cache", is_switch=True),
        "max_queue": ServerFlag("--max-queued-requests"),
        "kv_memory": no_flag(
            "SGLang takes tokens (--max-total-tokens) or a share of the memory with the weights (--mem-fraction-static)"
        ),
        "quantization": no_flag(
            "it rounds weights in another way there: --quantization fp8, or a quantised checkpoint"
        ),
        "kv_dtype": no_flag("it has no int8 keys and values; --kv-cache-dtype fp8_e5m2 is near"),
        "exact": no_flag("--enable-deterministic-inference comes near; drafts may still change a bit"),
        "no_fused": no_flag("SGLang has kernels of its own; --disable-cuda-graph runs without CUDA graphs"),
        "access_log": no_flag("SGLang logs requests with --log-requests"),
        "drain_timeout": no_flag("leave running requests time in the orchestrator before the process is stopped"),
        "request_timeout": no_flag("set it in the client or in a proxy"),
        "strict_max_tokens": no_flag("SGLang always refuses a request that exceeds the context"),
        "per_request_spec_metrics": no_flag("responses of /generate have figures of speculation in meta_info"),
        "allowed_host": no_flag("put a proxy in front, or give an API key"),
        "max_images": ServerFlag("--limit-mm-data-per-request", convert=lambda count: json.dumps({"image": count})),
        "allowed_local_media_path": no_flag("send images as data URLs"),
        "protect_metrics": no_flag("close /metrics in a proxy; SGLang has it with --enable-metrics"),
        "tensor_parallel_size": ServerFlag("--tp-size"),
        "replicas": no_flag("start several servers behind its gateway"),
        "max_replicas": no_flag("the orchestrator scales"),
        "replica_load": no_flag("the orchestrator scales"),
        "stored_responses": no_flag("SGLang stores responses without a bound"),
        "stored_response_memory": no_flag("its store has no bound"),
        "traces": no_flag("it sends hidden states with --enable-return-hidden-states"),
        "no_vllm_metrics": no_flag("SGLang reports metrics of its own with --enable-metrics"),
    },
)
