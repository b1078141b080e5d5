"""Runs vLLM in an environment of its own: `VLLM_PYTHON -P tests/support/vllm_runner.py < job.json`.

The job is "flags", or a JSON object: `model`, `speculative_config` (or null), `prompts` (token ids), `max_tokens` and
`calls`. The last line of standard output is the list of flags of `vllm serve`, or a JSON object: the token ids of every
call, and the counters of speculation.
"""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(max(os.sched_getaffinity(0)))

COUNTERS = "vllm:spec_decode"


def run(job: dict) -> dict:
    """Load the engine and generate greedily."""
    import vllm

    spec = job["speculative_config"]
    engine = vllm.LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=job.get("max_model_len", 512),
        max_num_seqs=job.get("max_num_seqs", 4),
        enforce_eager=True,
        disable_log_stats=spec is None,
        **({} if spec is None else {"speculative_config": spec}),
    )
    params = vllm.SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )  # no text: the tokens are compared
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    texts = []
    for _ in range(job.get("calls", 1)):
        outputs = engine.generate(prompts, params, use_tqdm=False)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
    found = {} if spec is None else {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}
    counters = {name.removeprefix(f"{COUNTERS}_"): value for name, value in found.items() if name.startswith(COUNTERS)}
    return {"texts": texts, "counters": counters, "version": vllm.__version__}


def list_flags() -> list[str]:
    """Return the flags of `vllm serve`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return sorted(name for action in parser._actions for name in action.option_strings)


if __name__ == "__main__":
    job = json.loads(sys.stdin.read())
    print()
    print(json.dumps(list_flags() if job == "flags" else run(job)))
