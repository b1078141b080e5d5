"""Check of the sampling settings: p at every draft node against a slow reference, from the same logits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foredraft.certify.recorder import StepRecord, StepRecorder
from foredraft.certify.reference import ReferenceHistory, compute_reference
from foredraft.certify.result import CheckResult
from foredraft.certify.subject import Subject
from foredraft.outputs import Completion
from foredraft.sampling.params import Sampling
from foredraft.verification.rules import MATCH

NUM_PROMPTS = 2
NUM_NODES = 3  # draft nodes per step
OUTPUT_TOKENS = 10
MAX_ROWS = 48  # rows that are compared for each setting
RELATIVE_LIMIT = 1e-4  # of a probability: float32 arithmetic stays below 1e-5
MIN_MARGIN = 1e-4  # rows with a nearer cut of a filter are left out


@dataclass(frozen=True)
class SettingError:
    """Differences of one setting from the reference."""

    num_rows: int
    largest: float  # relative difference of a probability; infinite for a token that only one of the two allows


def check_parameters(subject: Subject) -> CheckResult:
    """Compare the engine's p under every sampling parameter with the slow reference, at draft nodes too."""
    settings = list_settings(_find_frequent_tokens(subject), _find_end_token(subject))
    errors = {name: _measure(subject, sampling) for name, sampling in settings.items()}
    wrong = [name for name, error in errors.items() if error.largest > RELATIVE_LIMIT]
    missing = [name for name, error in errors.items() if not error.num_rows]
    count, largest = sum(e.num_rows for e in errors.values()), max(e.largest for e in errors.values())
    evidence = (
        f"{len(settings)} settings, {count:,} rows at roots and draft nodes, largest relative error {largest:.1g}"
    )
    if wrong:
        evidence += f"; wrong: {', '.join(wrong)}"
    if missing:
        evidence += f"; without evidence: {', '.join(missing)}"
    return CheckResult(
        "sampling parameters",
        not wrong and not missing,
        evidence,
        {name: {"rows": error.num_rows, "largest": error.largest} for name, error in errors.items()},
    )


def list_settings(frequent: Sequence[int], end_token: int) -> dict[str, Sampling]:
    """List sampling parameters to test, by name.

    Args:
        frequent: four tokens that the outputs contain often, so that penalties and constraints on them matter.
        end_token: a token that min_tokens forbids.
    """
    a, b, c, d = frequent
    base = Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    changes: Mapping[str, Mapping[str, object]] = {
        "temperature 0": {"temperature": 0.0},
        "temperature 0.3": {"temperature": 0.3},
        "temperature 1.7": {"temperature": 1.7},
        "top_k": {"top_k": 5},
        "top_p": {"top_p": 0.8},
        "min_p": {"min_p": 0.05},
        "typical_p": {"typical_p": 0.6},
        "repetition_penalty": {"repetition_penalty": 1.4},
        "presence_penalty": {"presence_penalty": 0.8},
        "frequency_penalty": {"frequency_penalty": 0.5},
        "logit_bias": {"logit_bias": {a: 3.0, b: -4.0}},
        "bad_words": {"bad_words": ((a,), (b, c), (c, d, b))},
        "allowed_token_ids": {"allowed_token_ids": (a, b, c, d)},
        "min_tokens": {"min_tokens": 5, "stop_token_ids": (end_token,), "ignore_eos": False},
        "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
        "filters together": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
        "filters and penalties": {
            "temperature": 1.2,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.01,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "logit_bias": {a: 1.0},
            "bad_words": ((d,),),
        },
    }
    return {name: replace(base, **values) for name, values in changes.items()}  # type: ignore[arg-type]


def _find_frequent_tokens(subject: Subject) -> list[int]:
    """Find the four most frequent tokens of short greedy outputs, completed by the first token ids."""
    sampling = Sampling(temperature=0.0, max_tokens=2 * OUTPUT_TOKENS, ignore_eos=True)
    outputs = subject.draft(subject.prompts[:NUM_PROMPTS], sampling)
    counts = Counter(token for output in outputs for token in output.token_ids)
    tokens = [token for token, _ in counts.most_common(4)]
    return [*tokens, *(token for token in range(8) if token not in tokens)][:4]


def _find_end_token(subject: Subject) -> int:
    """Return an end token of the model, or the last token id for a model without one."""
    return min(subject.drafting.end_ids, default=subject.drafting.target.vocab_size - 1)


def _measure(subject: Subject, sampling: Sampling) -> SettingError:
    """Measure the largest difference of a setting over the rows of a few short outputs."""
    recorder = StepRecorder(MATCH if sampling.is_greedy else subject.rule, keeps_logits=True)
    prompts = subject.prompts[:NUM_PROMPTS]
    samplings = [replace(sampling, seed=seed) for seed in range(len(prompts))]
    outputs = subject.draft(prompts, samplings, NUM_NODES, recorder.as_rule())
    differences: list[float] = []
    for record in sorted(recorder.records, key=lambda r: -r.num_drafted):  # steps with drafts first
        if len(differences) < MAX_ROWS:
            differences += _compare_rows(record, sampling, outputs[record.seed], subject)
    return SettingError(len(differences), max(differences, default=0.0))


def _compare_rows(record: StepRecord, sampling: Sampling, output: Completion, subject: Subject) -> list[float]:
    """Compare p of every node of a step; rows at which a filter cuts between nearly equal tokens are left out."""
    assert record.logits is not None
    end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else subject.drafting.end_ids)
    result = []
    for node, (logits, probs) in enumerate(zip(record.logits, record.probs, strict=True)):
        output_tokens = (*record.prefix, *record.tree.collect_path(node))
        history = ReferenceHistory(tuple(output.prompt_token_ids), output_tokens, end_ids)
        expected = compute_reference(logits.double().cpu().numpy(), sampling, history)
        if expected.margin > MIN_MARGIN:
            result.append(_measure_difference(probs.gather(None), expected.p))
    return result


def _measure_difference(p: np.ndarray, expected: np.ndarray) -> float:
    if ((p > 0) != (expected > 0)).any():  # tokens whose probability is 0 in float32 are no difference
        unequal = np.maximum(p, expected)[(p > 0) != (expected > 0)].max()
        return float("inf") if unequal > 1e-30 else 0.0
    positive = expected > 1e-30
    return float((np.abs(p - expected)[positive] / expected[positive]).max())
