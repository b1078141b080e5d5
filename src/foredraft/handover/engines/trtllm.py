"""TensorRT-LLM with its PyTorch backend. It takes speculation and memory in a YAML file."""

from foredraft.handover.engine import DrafterArguments, EngineDrafter, EngineTable
from foredraft.handover.server_flag import ServerFlag, no_flag

# Its documentation starts these with the overlap scheduler off.
WITHOUT_OVERLAP = frozenset({"NGram", "Draft_Target"})


def write_drafter(drafter: EngineDrafter) -> DrafterArguments:
    """Return the drafter as entries of the YAML file."""
    [name] = drafter.names
    model = {} if drafter.model is None else {"speculative_model": drafter.model}
    config = {"decoding_type": name, "max_draft_len": drafter.num_tokens, **model, **drafter.settings}
    overlap = {"disable_overlap_scheduler": True} if name in WITHOUT_OVERLAP else {}
    return DrafterArguments(config={"speculative_config": config, **overlap})


ENGINE = EngineTable(
    name="trtllm",
    title="TensorRT-LLM",
    version="1.3 in development (documentation at 04c8822, tensorrt_llm/commands/serve.py at 00209af, llm_args.py)",
    program=("trtllm-serve",),
    target_flag="",
    write_drafter=write_drafter,
    images={"cuda": "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc6"},
    entrypoint=("trtllm-serve",),
    nearest="an EAGLE-3 head, which `foredraft train eagle3` makes, or --spec-method suffix without a model",
    config_flag="--config",
    flags={
        "served_model_name": ServerFlag("--served_model_name"),
        "chat_template": ServerFlag("--chat_template", is_folder=True),
        "tool_call_parser": no_flag("trtllm-serve has parsers of its own; see its --tool_parser"),
        "reasoning_parser": no_flag("trtllm-serve has parsers of its own; see its --reasoning_parser"),
        "revision": ServerFlag("--revision"),
        "tokenizer": ServerFlag("--tokenizer", is_folder=True),
        "dtype": ServerFlag(
            config=lambda value: {"dtype": value}, values=frozenset({"auto", "float16", "bfloat16", "float32"})
        ),
        "max_model_len": ServerFlag("--max_seq_len"),
        "max_batch": ServerFlag("--max_batch_size"),
        "max_step_tokens": ServerFlag("--max_num_tokens"),
        "no_prefix_cache": ServerFlag(config=lambda value: {"kv_cache_config": {"enable_block_reuse": not value}}),
        "max_chunk": no_flag("--enable_chunked_prefill splits prompts, by --max_num_tokens"),
        "kv_memory": no_flag("TensorRT-LLM takes a share of the free memory: --free_gpu_memory_fraction"),
        "device": no_flag("TensorRT-LLM needs CUDA"),
        "quantization": no_flag("give a checkpoint that NVIDIA's Model Optimizer has quantised"),
        "kv_dtype": no_flag("kv_cache_config.dtype in its options has fp8"),
        "exact": no_flag("TensorRT-LLM makes no such promise"),
        "no_fused": no_flag("TensorRT-LLM has kernels of its own"),
        "access_log": no_flag("see --log_level"),
        "max_queue": no_flag("bound the queue in a proxy"),
        "drain_timeout": no_flag("leave running requests time in the orchestrator before the process is stopped"),
        "request_timeout": no_flag("set it in the client or in a proxy"),
        "strict_max_tokens": no_flag("TensorRT-LLM always refuses a request that exceeds --max_seq_len"),
        "per_request_spec_metrics": no_flag("/metrics has the figures of the iterations"),
        "allowed_host": no_flag("put a proxy in front"),
        "max_images": no_flag("it reads the images of models that it knows, without a bound"),
        "allowed_local_media_path": no_flag("send images as data URLs"),
        "protect_metrics": no_flag("close /metrics in a proxy"),
        "tensor_parallel_size": ServerFlag("--tp_size"),
        "replicas": no_flag("start several servers behind a proxy"),
        "max_replicas": no_flag("the orchestrator scales"),
        "replica_load": no_flag("the orchestrator scales"),
        "stored_responses": no_flag(
            "TensorRT-LLM stores responses unless TRTLLM_RESPONSES_API_DISABLE_STORE=1 is in its environment"
        ),
        "stored_response_memory": no_flag("it bounds no bytes"),
        "traces": no_flag("it sends no hidden states"),
        "no_vllm_metrics": no_flag("TensorRT-LLM reports metrics of its own"),
    },
)
