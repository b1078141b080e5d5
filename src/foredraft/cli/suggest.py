"""Name the option that was meant: the words of vLLM, llama.cpp and transformers, and near misses of ours."""

import difflib
from collections.abc import Sequence

NO_OPTION = "no option: "  # begins the reason why there is none

# An option of another program -> ours, or what to do in its place.
ELSEWHERE = {
    "--gpu-memory-utilization": "--kv-memory",
    "--max-num-seqs": "--max-batch",
    "--parallel": "--max-batch",
    "-np": "--max-batch",
    "--max-num-batched-tokens": "--max-chunk",
    "--batch-size": "--max-chunk",
    "--ctx-size": "--max-model-len",
    "-c": "--max-model-len",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--max-length": "--max-tokens",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--typical": "--typical-p",
    "--draft": "--spec-tokens",
    "--draft-n": "--spec-tokens",
    "--spec-draft-n-max": "--spec-tokens",
    "--num-assistant-tokens": "--spec-tokens",
    "--assistant-model": "--spec-model",
    "--spec-type": "--spec-method",
    "--drafter": "--spec-method",
    "--speculative-model": "--spec-model",
    "--quantize": "--quantization",
    "--enforce-eager": "--no-fused",
    "--alias": "--served-model-name",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--tokenizer": "a folder with the model and its tokenizer, given to --model",
    "--threads": "OMP_NUM_THREADS=N in the environment",
    "-t": "OMP_NUM_THREADS=N in the environment",
    "--tensor-parallel-size": f"{NO_OPTION}one process runs one model on one device",
    "--n-gpu-layers": "--device cuda",
    "-ngl": "--device cuda",
    "--trust-remote-code": f"{NO_OPTION}code that comes with a model is never run",
    "--lora": f"{NO_OPTION}merge the adapter into its base model first (PEFT's merge_and_unload)",
    "--enable-lora": f"{NO_OPTION}merge the adapter into its base model first (PEFT's merge_and_unload)",
    "--draft-min": f"{NO_OPTION}--spec-tokens bounds a draft from above alone",
    "--swap-space": f"{NO_OPTION}a sequence that gives way is computed again, not swapped",
    "--disable-log-requests": f"{NO_OPTION}requests are logged only with --access-log",
}


def answer_unknown(wrong: str, known: Sequence[str]) -> str:
    """The message for an unknown option: what to type in its place, or why there is none."""
    meant = suggest_option(wrong, known)
    if meant is None:
        return f"unknown option {wrong}"
    reason = meant.removeprefix(NO_OPTION)
    return f"unknown option {wrong}; " + (f"use {meant}" if reason == meant else f"there is none here: {reason}")


def suggest_option(wrong: str, known: Sequence[str]) -> str | None:
    """What to type in place of an unknown option; None if nothing is near."""
    if wrong in ELSEWHERE:
        ours = ELSEWHERE[wrong]
        return ours if not ours.startswith("--") or ours.split()[0] in known else None
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    return near[0] if near else None
