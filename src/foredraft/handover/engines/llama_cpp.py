"""llama-server of llama.cpp. Models that are not GGUF files are converted first."""

from shlex import quote
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.handover.engine import DrafterArguments, EngineDrafter, EngineTable, Preparation
from foredraft.handover.server_flag import ServerFlag, no_flag

CONVERT = "python llama.cpp/convert_hf_to_gguf.py"


def write_drafter(drafter: EngineDrafter) -> DrafterArguments:
    """Return the flags of a drafter, or of several methods, which draft in this order of preference."""
    flags: dict[str, Any] = {"--spec-type": ",".join(drafter.names)}
    if drafter.model is not None:
        flags |= {"--spec-draft-model": drafter.model, "--spec-draft-n-max": drafter.num_tokens}
    flags |= drafter.settings
    return DrafterArguments(tuple(str(part) for item in flags.items() for part in item))


def prepare(target: str, model: str | None, is_head: bool, folder: str) -> Preparation:
    """Return the conversions to GGUF. A head takes its tokenizer and layer ids from its target.

    Raises:
        ForedraftError: a head is for a target that is a GGUF file already.
    """
    is_converted = target.lower().endswith(".gguf")
    if is_converted and is_head:
        raise ForedraftError(f"a head is converted with the folder of its target, and {target} is a GGUF file")
    target_file = target if is_converted else f"{folder}/target.gguf"
    commands = [] if is_converted else [f"{CONVERT} {quote(target)} --outfile {quote(target_file)}"]
    if model is None:
        return Preparation(tuple(commands), target_file, None)
    model_file = f"{folder}/drafter.gguf"
    head = f" --target-model-dir {quote(target)}" if is_head else ""
    commands.append(f"{CONVERT} {quote(model)}{head} --outfile {quote(model_file)}")
    return Preparation(tuple(commands), target_file, model_file)


ENGINE = EngineTable(
    name="llama.cpp",
    title="llama.cpp",
    version="tools/server/README.md at 00dc805",
    program=("llama-server",),
    target_flag="--model",
    write_drafter=write_drafter,
    images={"cuda": "ghcr.io/ggml-org/llama.cpp:server-cuda", "cpu": "ghcr.io/ggml-org/llama.cpp:server"},
    nearest="an EAGLE-3 head, which `foredraft train eagle3` makes, or --spec-method ngram without a model",
    api_key_flag="--api-key",
    combines=True,
    prepare=prepare,
    note="sampled requests: its default sampling parameters are not those here (temperature 0.8, top-k 40, min-p 0.05)",
    flags={
        "served_model_name": ServerFlag("--alias", convert=lambda names: ",".join(names)),
        "chat_template": ServerFlag("--chat-template-file", is_folder=True),
        "tool_call_parser": no_flag("llama-server finds the format by the chat template, with --jinja"),
        "reasoning_parser": no_flag("see --reasoning-format, whose default finds it by the chat template"),
        "max_model_len": ServerFlag(
            "--kv-unified-per-slot", "it bounds each of the slots; --ctx-size is the memory of all of them"
        ),
        "max_batch": ServerFlag("--parallel"),
        "max_step_tokens": ServerFlag("--batch-size"),
        "max_chunk": ServerFlag("--ubatch-size", "it bounds the whole pass, not one request of it"),
        "no_prefix_cache": ServerFlag("--no-cache-prompt", is_switch=True),
        "request_timeout": ServerFlag(
            "--timeout", "it bounds reading and writing, not the whole request", convert=round
        ),
        "device": no_flag("the build decides it; --n-gpu-layers 0 computes on the CPU"),
        "dtype": no_flag("give --outtype to the conversion: f32, f16 or bf16"),
        "quantization": no_flag("give --outtype q8_0 to the conversion, or use llama-quantize"),
        "revision": no_flag("convert a folder with that revision"),
        "tokenizer": no_flag("it is part of the GGUF file"),
        "kv_memory": no_flag("the KV cache has --ctx-size tokens"),
        "kv_dtype": no_flag("--cache-type-k q8_0 --cache-type-v q8_0 is near, with a scale for 32 numbers"),
        "exact": no_flag("llama.cpp makes no such promise"),
        "no_fused": no_flag("llama.cpp has kernels of its own"),
        "access_log": no_flag("llama-server logs every request"),
        "max_queue": no_flag("bound the queue in a proxy"),
        "drain_timeout": no_flag("leave running requests time in the orchestrator before the process is stopped"),
        "strict_max_tokens": no_flag("llama-server ends the output at the context"),
        "per_request_spec_metrics": no_flag("responses have draft_n and draft_n_accepted in timings"),
        "allowed_host": no_flag("see --cors-origins, or give an API key"),
        "max_images": no_flag("llama-server reads images with --mmproj FILE, the image part in GGUF"),
        "allowed_local_media_path": ServerFlag("--media-path", is_folder=True),
        "protect_metrics": no_flag("close /metrics in a proxy; llama-server has it with --metrics"),
        "tensor_parallel_size": no_flag("see --split-mode and --tensor-split"),
        "replicas": no_flag("start several servers behind a proxy"),
        "max_replicas": no_flag("the orchestrator scales"),
        "replica_load": no_flag("the orchestrator scales"),
        "stored_responses": no_flag("llama-server stores none: clients send the whole conversation"),
        "stored_response_memory": no_flag("it stores none"),
        "traces": no_flag("it sends no hidden states"),
        "no_vllm_metrics": no_flag("llama-server reports metrics of its own with --metrics"),
    },
)
