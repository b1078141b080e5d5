"""Suggestions for unknown options: options of vLLM, llama.cpp and transformers, and misspelt options."""

import difflib
from collections.abc import Sequence

NO_OPTION_PREFIX = "no option: "  # marks an entry that is a reason instead of an option
MIN_SIMILARITY = 0.6  # least difflib ratio at which a known option is suggested

_ONE_DEVICE = (
    f"{NO_OPTION_PREFIX}one process runs one model on one device; start one server for each device with "
    "CUDA_VISIBLE_DEVICES=N in the environment"
)
_KV_SIZE = "--kv-memory with a size such as 2GiB (default: a quarter of the free memory)"
_FREE_ATTENTION = f"{NO_OPTION_PREFIX}the device decides the attention kernel"
_KV_TYPE = f"{NO_OPTION_PREFIX}the KV cache has the model's dtype; --dtype changes both"
_METHODS = ("--spec-method", "--methods METHOD", "--method METHOD")
_LENGTHS = ("--spec-tokens", "--methods METHOD:TOKENS", "--fixed")

# Option of another program or command -> the option to use, several of which the first that the command has, or advice.
FOREIGN_OPTIONS: dict[str, str | tuple[str, ...]] = {
    "--gpu-memory-utilization": _KV_SIZE,
    "--spec-method": _METHODS,
    "--spec-tokens": _LENGTHS,
    "--max-num-seqs": "--max-batch",
    "--parallel": "--max-batch",
    "-np": "--max-batch",
    "--max-num-batched-tokens": "--max-step-tokens",
    "--long-prefill-token-threshold": "--max-chunk",
    "--batch-size": "--max-step-tokens",
    "--ctx-size": "--max-model-len",
    "-c": "--max-model-len",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--max-length": "--max-tokens",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--typical": "--typical-p",
    "--typical-acceptance-sampler-posterior-threshold": "--posterior-threshold",
    "--typical-acceptance-sampler-posterior-alpha": "--posterior-alpha",
    "--spec-decoding-acceptance-method": "--verify",
    "--draft": _LENGTHS,
    "--draft-n": _LENGTHS,
    "--spec-draft-n-max": _LENGTHS,
    "--num-assistant-tokens": _LENGTHS,
    "--num-speculative-tokens": _LENGTHS,
    "--assistant-model": "--spec-model",
    "--spec-type": _METHODS,
    "--drafter": _METHODS,
    "--speculative-model": "--spec-model",
    "--quantize": "--quantization",
    "--enforce-eager": "--no-fused",
    "--alias": "--served-model-name",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--threads": "OMP_NUM_THREADS=N in the environment",
    "-t": "OMP_NUM_THREADS=N in the environment",
    "-tb": "OMP_NUM_THREADS=N in the environment",
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "-dp": _ONE_DEVICE,
    "--split-mode": _ONE_DEVICE,
    "-sm": _ONE_DEVICE,
    "--tensor-split": _ONE_DEVICE,
    "-ts": _ONE_DEVICE,
    "--n-gpu-layers": "--device cuda",
    "-ngl": "--device cuda",
    "-ngld": "--device cuda",
    "-dev": "--device",
    "--flash-attn": _FREE_ATTENTION,
    "-fa": _FREE_ATTENTION,
    "--cache-type-k": _KV_TYPE,
    "-ctk": _KV_TYPE,
    "--cache-type-v": _KV_TYPE,
    "-ctv": _KV_TYPE,
    "--cont-batching": f"{NO_OPTION_PREFIX}requests always join the running batch",
    "-cb": f"{NO_OPTION_PREFIX}requests always join the running batch",
    "--ubatch-size": "--max-chunk",
    "-ub": "--max-chunk",
    "-b": "--max-step-tokens",
    "--hf-repo": "--model",
    "-hf": "--model",
    "--system-prompt": "--system",
    "-sys": "--system",
    "--conversation": f"{NO_OPTION_PREFIX}foredraft chat holds conversations",
    "-cnv": f"{NO_OPTION_PREFIX}foredraft chat holds conversations",
    "--trust-remote-code": f"{NO_OPTION_PREFIX}code that comes with a model is never run",
    "--lora": f"{NO_OPTION_PREFIX}merge the adapter into its base model first (PEFT's merge_and_unload)",
    "--enable-lora": f"{NO_OPTION_PREFIX}merge the adapter into its base model first (PEFT's merge_and_unload)",
    "--draft-min": f"{NO_OPTION_PREFIX}--spec-tokens bounds a draft from above only",
    "--swap-space": f"{NO_OPTION_PREFIX}a preempted sequence is computed again, not swapped",
    "--disable-log-requests": f"{NO_OPTION_PREFIX}requests are logged only with --access-log",
}


# Option that only `foredraft serve` has -> advice for the other commands.
SERVE_ONLY = {
    name: f"{name} is an option of foredraft serve only"
    for name in ("--max-batch", "--max-chunk", "--max-step-tokens", "--no-prefix-cache", "--served-model-name")
} | {"--kv-memory": "the KV cache takes at most a quarter of the free memory; foredraft serve sets it with --kv-memory"}


def is_short_word(word: str) -> bool:
    """Return whether a word is an option of another program with one dash and several letters."""
    return word in FOREIGN_OPTIONS and not word.startswith("--") and len(word) > 2


def format_unknown_option(wrong: str, known: Sequence[str]) -> str:
    """Return the message for an unknown option: the option to use, or why there is none.

    Args:
        wrong: the unknown option.
        known: options of the command.
    """
    suggestion = suggest_option(wrong, known)
    if suggestion is None:
        reasons = [SERVE_ONLY[name] for option in _counterparts(wrong) if (name := option.split()[0]) in SERVE_ONLY]
        return f"unknown option {wrong}" + (f"; there is none here: {reasons[0]}" if reasons else "")
    reason = suggestion.removeprefix(NO_OPTION_PREFIX)
    return f"unknown option {wrong}; " + (
        f"use {suggestion}" if reason == suggestion else f"there is none here: {reason}"
    )


def suggest_option(wrong: str, known: Sequence[str]) -> str | None:
    """Return the option to use instead of an unknown one, or advice; None if no option is similar."""
    if wrong in FOREIGN_OPTIONS:
        usable = (entry for entry in _counterparts(wrong) if not entry.startswith("--") or entry.split()[0] in known)
        return next(usable, None)
    similar = difflib.get_close_matches(wrong, known, n=1, cutoff=MIN_SIMILARITY)
    return similar[0] if similar else None


def _counterparts(wrong: str) -> tuple[str, ...]:
    entries = FOREIGN_OPTIONS.get(wrong, ())
    return (entries,) if isinstance(entries, str) else entries
