"""Result and report of one step of the engine."""

from dataclasses import dataclass

from foredraft.draft_length.policy import DraftOutcome, StepReport
from foredraft.engine.step_clock import StepClock
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


@dataclass(frozen=True)
class StepResult:
    """Outcome of one step. The new text is in `Transcript.deltas` of the requests in `progressed`."""

    requests: tuple[Request, ...] = ()  # requests of the batch; empty if none could run
    progressed: tuple[Request, ...] = ()  # those of them that have a new delta
    report: StepReport | None = None  # sizes and times; None if no request ran


NO_STEP = StepResult()  # result of a step in which no request could run


def count_attended_tokens(batch: Batch, tree: TokenTree) -> int:
    """Count the tokens that all nodes of a step attend to.

    Each of a request's n nodes counts as attending to all computed tokens and to all n nodes. Call it before
    `Scheduler.commit`, which advances `num_computed`.
    """
    return sum([n * (r.num_computed + n) for n, r in zip(tree.sizes, batch.requests, strict=True)])


def build_report(
    batch: Batch, tree: TokenTree, commit: Commit, clock: StepClock, attended_tokens: int, is_observed: bool = True
) -> StepReport:
    """Build the report of a step at its end.

    Args:
        batch: requests of the step.
        tree: verified tree.
        commit: its committed paths.
        clock: times of the step.
        attended_tokens: tokens attended to, as counted before `Scheduler.commit`.
        is_observed: whether the drafter was given all outputs of the target that it reads.
    """
    return StepReport(
        num_requests=len(batch),
        num_pass_tokens=sum(tree.sizes),
        num_logit_rows=tree.row_offsets[-1],
        attended_tokens=attended_tokens,
        draft_time=clock.propose_seconds + clock.observe_seconds,
        step_time=clock.step_seconds,
        outcomes=collect_outcomes(batch, tree, commit),
        is_observed=is_observed,
    )


def collect_outcomes(batch: Batch, tree: TokenTree, commit: Commit) -> tuple[DraftOutcome, ...]:
    """List the draft outcome of every request with a scored root.

    Accepted nodes are the draft nodes on the committed path: each saved a forward pass. An accepted token without a
    token after it saved none, so it counts in the statistics alone (`num_accepted`). Nodes are counted from 1 after the
    root.
    """
    outcomes = []
    for b, (request, granted) in enumerate(zip(batch.requests, batch.granted_nodes, strict=True)):
        root, size = tree.roots[b], tree.sizes[b]
        if root < size and b not in commit.failed:
            accepted = tuple([node - root for node in commit.paths[b][root + 1 :]]) if root + 1 < size else ()
            confidences = () if tree.confidences is None else tree.confidences.get(b, ())
            outcomes.append(DraftOutcome(request.slot, granted, size - root - 1, accepted, confidences))
    return tuple(outcomes)
