"""Name the option that was meant: the words of vLLM, llama.cpp and transformers, and near misses of ours."""

import difflib
from collections.abc import Sequence

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
    "--tensor-parallel-size": "no option: one process runs one model on one device",
    "--n-gpu-layers": "--device cuda",
    "-ngl": "--device cuda",
    "--trust-remote-code": "no option: code that comes with a model is never run",
}


def suggest_option(wrong: str, known: Sequence[str]) -> str | None:
    """What to type in place of an unknown option; None if nothing is near."""
    if wrong in ELSEWHERE:
        ours = ELSEWHERE[wrong]
        return ours if not ours.startswith("--") or ours.split()[0] in known else None
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    return near[0] if near else None
