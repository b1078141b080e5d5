"""Warnings of a diagnosis, each with what to do."""

from dataclasses import dataclass

from foredraft.doctor.examination import DrafterResult
from foredraft.doctor.facts import DrafterFacts, MachineFacts, TargetFacts
from foredraft.doctor.prediction import StreamPrediction
from foredraft.drafters.spec import SAME_VOCABULARY

MIN_GAIN = 0.01  # predicted speed-up minus 1 below which drafts do not pay, as for the adaptive policy
FEW_DRAFTS = 60  # drafts below which the acceptance is a rough estimate
MIN_BATCH = 2  # requests that should fit into the KV memory
MEMORY_SHARE = 0.1  # free memory over the size of the weights below which memory is short


@dataclass(frozen=True)
class Finding:
    """One warning."""

    code: str  # for programs: mismatch, large draft, costly rows, vocabulary, not native, memory, few drafts
    text: str
    remedy: str
    drafter: str | None = None  # label; None = it concerns target or machine


def pays(prediction: StreamPrediction) -> bool:
    """Return whether drafts are predicted to save time with this number of streams."""
    return prediction.speed_up > 1.0 + MIN_GAIN


def check_target(target: TargetFacts, machine: MachineFacts, is_cpu: bool) -> list[Finding]:
    """List what slows the target down, whatever drafts."""
    found = []
    if is_cpu and not target.is_native:
        found.append(Finding(
            "not native", f"{target.name} runs as torch modules ({target.reason})",
            "use a model of a family that docs/models.md lists as native, in bfloat16 or float32, without --no-fused",
        ))  # fmt: skip
    if target.largest_batch < MIN_BATCH or machine.free_bytes < MEMORY_SHARE * target.weight_bytes:
        found.append(Finding(
            "memory", f"the KV memory holds {target.largest_batch} requests of {target.context} tokens, and "
            f"{machine.free_bytes / 2**30:.1f} GiB are free",
            "load the target with --quantization int8, or use a machine with more memory",
        ))  # fmt: skip
    return found


def check_drafter(facts: DrafterFacts, result: DrafterResult, is_cpu: bool) -> list[Finding]:
    """List what is wrong with a drafter."""
    label, acceptance = facts.label, result.acceptance
    found = []
    if facts.model is not None and result.is_near_chance:
        found.append(Finding(
            "mismatch", f"the first token of {acceptance.num_first_accepted} in {acceptance.num_drafts} drafts was "
            "accepted, which is chance", "give a drafter that was trained for this target: foredraft train", label,
        ))  # fmt: skip
    elif not any(map(pays, result.predictions)):
        found.append(_explain_loss(label, result.predictions))
    if facts.vocabulary != SAME_VOCABULARY:
        found.append(Finding(
            "vocabulary", f"its tokenizer differs from the target's, so it drafts by {facts.vocabulary}",
            "a draft model with the target's tokenizer drafts faster and is accepted more often", label,
        ))  # fmt: skip
    if is_cpu and facts.is_native is False:
        found.append(Finding(
            "not native", "its network runs as torch modules",
            "use a draft of a family that docs/models.md lists as native, in bfloat16 or float32", label,
        ))  # fmt: skip
    if acceptance.num_drafts < FEW_DRAFTS:
        found.append(Finding(
            "few drafts", f"only {acceptance.num_drafts} drafts were measured, so its acceptance is a rough estimate",
            "give a larger --seconds, or prompts on which it drafts", label,
        ))  # fmt: skip
    return found


def _explain_loss(label: str, predictions: tuple[StreamPrediction, ...]) -> Finding:
    """Return why no draft length saves time: the drafter's own time, or the rows of the pass."""
    best = max(prediction.speed_up for prediction in predictions)
    free = max(prediction.undrafted_speed_up for prediction in predictions)
    if free > 1.0 + MIN_GAIN:
        return Finding(
            "large draft", f"its own time leaves no gain at any length: {best:.2f}x at best, and {free:.2f}x if it "
            "took no time", "use a smaller draft, --spec-quantization int8, a head, or a method without a model",
            label,
        )  # fmt: skip
    return Finding(
        "costly rows", f"its drafts cost more rows of the target's pass than they gain: {best:.2f}x at best, and "
        f"{free:.2f}x if drafting took no time", "use shorter drafts or fewer tree_nodes, a drafter that is accepted "
        "more often, or plain decoding (--spec-method none)", label,
    )  # fmt: skip
