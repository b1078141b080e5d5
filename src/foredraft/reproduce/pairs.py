"""Pairs of target and drafter that papers and programs name. They run when their folders are given."""

from dataclasses import dataclass

CHAIN_CLAIM, METHOD_CLAIM, LAYER_CLAIM = "draft_length", "trees", "early_exit"


@dataclass(frozen=True)
class Pair:
    """A target with a drafter.

    Attributes:
        target: hub id or name of the target.
        drafter: hub id or name of the draft model or head; "" = the target itself.
        claim: name of the claim to run.
        paper: arXiv id; "" = none.
        statement: what the abstract of the paper states.
    """

    target: str
    drafter: str
    claim: str
    paper: str
    statement: str

    @property
    def command(self) -> str:
        """The command that measures the pair, with its folders in capitals."""
        drafter = " --spec-model DRAFTER" if self.drafter else ""
        return f"foredraft reproduce {self.claim} --model TARGET{drafter} --out DIR"


PAIRS = (
    Pair("google/t5-v1_1-xxl", "google/t5-v1_1-small", CHAIN_CLAIM, "2211.17192", "2x to 3x for T5-XXL"),
    Pair("Chinchilla 70B", "a draft of 4B (neither is public)", CHAIN_CLAIM, "2302.01318", "2x to 2.5x"),
    Pair("huggyllama/llama-7b", "JackFram/llama-68m", METHOD_CLAIM, "2305.09781", "1.5x to 2.8x over other systems"),
    Pair("meta-llama/Llama-2-7b-hf", "JackFram/llama-68m", CHAIN_CLAIM, "", "a common pair of small scale"),
    Pair("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", CHAIN_CLAIM, "", "a common pair of one family"),
    Pair("lmsys/vicuna-7b-v1.3", "FasterDecoding/medusa-vicuna-7b-v1.3", METHOD_CLAIM, "2401.10774", "2.2x to 3.6x"),
    Pair("lmsys/vicuna-7b-v1.3", "yuhuili/EAGLE-Vicuna-7B-v1.3", METHOD_CLAIM, "2406.16858", "3.05x to 4.26x"),
    Pair(
        "meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", METHOD_CLAIM, "2503.01840",
        "up to 6.5x over all its models",
    ),
    Pair("meta-llama/Llama-2-13b-chat-hf", "ibm-fms/llama-13b-accelerator", CHAIN_CLAIM, "2404.19124", "2x to 3x"),
    Pair("facebook/layerskip-llama2-7B", "", LAYER_CLAIM, "2404.16710", "1.82x to 2.16x on three tasks"),
)  # fmt: skip
