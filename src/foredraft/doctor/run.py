"""A run of `foredraft doctor`: facts, measurements and the check, in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.bench.grow import find_built_in_origin
from foredraft.doctor.candidate import Candidate, attach_model, list_candidates
from foredraft.doctor.diagnosis import Diagnosis, DrafterDiagnosis
from foredraft.doctor.examination import DrafterResult, Examination
from foredraft.doctor.facts import examine_drafter, examine_machine, examine_target
from foredraft.doctor.findings import Finding, check_drafter, check_target
from foredraft.doctor.measured_llm import MeasuredLLM
from foredraft.doctor.speed_check import CheckedSpeed, check_speed
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.models.prompts import Prompt
from foredraft.sampling.params import Sampling


@dataclass(frozen=True)
class DoctorPlan:
    """Drafters, prompts and limits of an examination.

    Attributes:
        candidates: drafters that the user gave; () = those that exist for the target.
        prompts: prompts as text.
        sampling: sampling of all requests.
        seconds: measuring time; the check of the speed takes as long again.
        streams: numbers of streams to predict for.
        is_checked: measure the speed too.
        quantization: quantisation of the loaded target.
        context: tokens of a request for the largest batch.
    """

    candidates: tuple[Candidate, ...]
    prompts: tuple[str, ...]
    sampling: Sampling
    seconds: float
    streams: tuple[int, ...]
    is_checked: bool = False
    quantization: str | None = None
    context: int = 2048


def run(plan: DoctorPlan, llm: LLM, on_progress: Callable[[str], None]) -> Diagnosis:
    """Examine a target and its drafters.

    Args:
        plan: what to examine.
        llm: plain decoding.
        on_progress: called with what is measured next.

    Raises:
        ForedraftError: no prompt fits the model's context.
    """
    on_progress("reading memory")
    machine, target = examine_machine(llm), examine_target(llm, plan.quantization, plan.context)
    candidates = [attach_model(one, llm) for one in plan.candidates] or list_candidates(llm)
    drafting, unfit = _load_drafters(llm, candidates, on_progress)
    prompts = _encode(llm, plan.prompts, plan.sampling)
    examination = Examination(
        MeasuredLLM.make_plain(llm), drafting, prompts, plan.sampling, plan.streams, plan.seconds,
        on_progress,
    )  # fmt: skip
    examination.measure()
    is_cpu, builtin = llm.target.device.type == "cpu", llm.builtin or find_built_in_origin(llm.target.model.config)
    findings: list[Finding] = check_target(target, machine, is_cpu)
    drafters = []
    for candidate in (one for one in candidates if one.label in drafting):
        facts = examine_drafter(candidate, drafting[candidate.label].llm, builtin)
        result = examination.evaluate(candidate.label)
        findings += check_drafter(facts, result, is_cpu)
        checks = _check(plan, examination, candidate.label, result, len(drafting)) if plan.is_checked else ()
        drafters.append(DrafterDiagnosis(candidate, facts, result, checks))
    plain_seconds = examination.fit_plain()
    return Diagnosis(
        machine, target, tuple(drafters), unfit, examination.points, plain_seconds, tuple(findings),
        bool(plan.candidates), examination.output_tokens,
    )  # fmt: skip


def _load_drafters(
    llm: LLM, candidates: Sequence[Candidate], on_progress: Callable[[str], None]
) -> tuple[dict[str, MeasuredLLM], dict[str, str]]:
    """Return the engines with a drafter by label, and the reasons of those that cannot be used."""
    drafting, unfit = {}, {}
    for candidate in candidates:
        on_progress(f"loading {candidate.label}")
        try:
            drafting[candidate.label] = MeasuredLLM.make_drafting(llm, candidate.spec)
        except ForedraftError as error:
            unfit[candidate.label] = str(error)
    return drafting, unfit


def _encode(llm: LLM, texts: Sequence[str], sampling: Sampling) -> list[Prompt]:
    """Return the prompts that fit the context, as token ids; those of an encoder-decoder model as text."""
    if llm.target.has_encoder:
        return list(texts)
    if llm.tokenizer is None:
        raise ForedraftError(f"{llm.target.name} has no tokenizer; put tokenizer.json beside its weights")
    room = llm.target.context_length - sampling.max_tokens
    encoded = [list(llm.tokenizer(text).input_ids) for text in texts]
    fitting = [ids for ids in encoded if 0 < len(ids) <= room]
    if not fitting:
        raise ForedraftError("no prompt fits the model's context with --max-tokens; give fewer tokens or other prompts")
    return list(fitting)


def _check(
    plan: DoctorPlan, examination: Examination, label: str, result: DrafterResult, num_drafters: int
) -> tuple[CheckedSpeed, ...]:
    """Measure the speed-up of a drafter with its best length, for every number of streams."""
    seconds = plan.seconds / (num_drafters * len(plan.streams))
    checks = []
    for one in result.predictions:
        examination.on_progress(f"checking {label}, {one.num_streams} streams")
        checks.append(check_speed(
            examination.plain, examination.drafting[label], one.length, examination.prompts, one.num_streams,
            plan.sampling, seconds,
        ))  # fmt: skip
    return tuple(checks)
