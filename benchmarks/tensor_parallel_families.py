"""Largest difference of logits between two processes and one, for a tiny model of every family.

    python -m benchmarks.tensor_parallel_families

The models are those of tests/support/families.py, in float64; families whose experts need float32 run in float32.
"""

import os
import tempfile
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from transformers.distributed import DistributedConfig

from tests.support.families import FAMILIES

TOKENS = torch.tensor([[5, 9, 11, 3, 44, 80, 2, 7]])
SINGLE = ("qwen3_moe", "mixtral", "gpt_oss")  # their grouped products exist up to float32
NUM_PROCESSES = 2


def get_dtype(family: str) -> torch.dtype:
    return torch.float32 if family in SINGLE else torch.float64


def run_rank(rank: int, folder: str, answers: "Queue[tuple[str, object]]") -> None:
    """Load a part of every model, and send the logits of rank 0 or the error."""
    os.environ["LOCAL_RANK"] = str(rank)
    hf.utils.logging.disable_progress_bar()
    hf.utils.logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_PROCESSES)
    for family in FAMILIES:
        try:
            config = DistributedConfig(tp_size=NUM_PROCESSES)
            model = hf.AutoModelForCausalLM.from_pretrained(
                f"{folder}/{family}", dtype=get_dtype(family), distributed_config=config
            )
            with torch.inference_mode():
                answer: object = model(TOKENS, use_cache=False).logits.tolist()
        except (ValueError, RuntimeError) as error:
            answer = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
        if rank == 0:
            answers.put((family, answer))


def main() -> None:
    hf.utils.logging.disable_progress_bar()
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        expected = {}
        for family, make in FAMILIES.items():
            torch.manual_seed(0)
            model = hf.AutoModelForCausalLM.from_config(make()).to(get_dtype(family)).eval()
            model.save_pretrained(Path(folder) / family)
            with torch.inference_mode():
                expected[family] = model(TOKENS, use_cache=False).logits
        answers = context.Queue()
        ranks = [context.Process(target=run_rank, args=(rank, folder, answers)) for rank in range(NUM_PROCESSES)]
        for rank in ranks:
            rank.start()
        for _ in FAMILIES:
            family, answer = answers.get(timeout=300)
            if not isinstance(answer, str):
                logits = torch.tensor(answer, dtype=get_dtype(family))
                answer = f"{(logits - expected[family]).abs().max():.1e}"
            print(f"{family:20} {str(get_dtype(family)).removeprefix('torch.')}  {answer}")
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
