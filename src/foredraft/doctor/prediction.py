"""Predicted speed-up of a drafter, from its acceptance and from the costs of steps. No clock, no model.

A request costs the time until its first token, then one step per `tokens_per_pass` tokens. A step costs the target's
pass over its rows, the drafter, and the rest of the engine's work, which is part of the fitted pass.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from foredraft.doctor.acceptance import MeasuredAcceptance
from foredraft.doctor.cost_fit import FittedCosts


@dataclass(frozen=True)
class StreamCosts:
    """Costs of plain decoding and of a drafter with one number of streams."""

    num_streams: int
    plain: FittedCosts
    drafting: FittedCosts
    plain_start: float  # seconds until the first tokens of one request
    drafting_start: float  # the same with the drafter, which reads the prompt too


@dataclass(frozen=True)
class StreamPrediction:
    """Prediction for one number of streams, with the best draft length."""

    num_streams: int
    length: int  # draft nodes per request with the highest speed
    tokens_per_pass: float  # of one request
    plain_rate: float  # tokens per second of all streams without drafts, the first token's time included
    rate: float  # with drafts
    by_length: Mapping[int, float]  # speed-up by draft nodes per request
    undrafted_speed_up: float  # best speed-up if the drafter took no time

    @property
    def speed_up(self) -> float:
        return self.rate / self.plain_rate


def predict_streams(
    costs: StreamCosts,
    acceptance: Mapping[int, MeasuredAcceptance],
    output_tokens: float,
    choices: Collection[int] = (),
) -> StreamPrediction:
    """Predict the speed with every measured draft length, and choose the best.

    Args:
        costs: measured costs.
        acceptance: acceptance of drafts of one length, by length. A draft after short ones is accepted more often than
            after long ones, which have used up the easy text, so every length has its own.
        output_tokens: mean tokens of an output; the time until the first token is spread over them.
        choices: lengths to choose from; () = all of `acceptance`.
    """
    plain_rate = _compute_rate(
        costs, costs.plain.predict_plain(costs.num_streams), 1.0, costs.plain_start, output_tokens
    )
    rates = {n: _predict_rate(costs, one, n, output_tokens, False) for n, one in acceptance.items()}
    free_rates = [_predict_rate(costs, one, n, output_tokens, True) for n, one in acceptance.items()]
    best = max(choices or rates, key=rates.__getitem__)
    return StreamPrediction(
        costs.num_streams, best, acceptance[best].tokens_per_pass(best), plain_rate, rates[best],
        {n: rate / plain_rate for n, rate in rates.items()}, max(free_rates) / plain_rate,
    )  # fmt: skip


def _predict_rate(
    costs: StreamCosts, acceptance: MeasuredAcceptance, length: int, output_tokens: float, has_free_drafts: bool
) -> float:
    """Return tokens per second of all streams with drafts of up to `length` nodes."""
    nodes = costs.num_streams * acceptance.nodes_per_pass(length)
    step_seconds = costs.drafting.predict_step(costs.num_streams, length, nodes, has_free_drafts)
    return _compute_rate(costs, step_seconds, acceptance.tokens_per_pass(length), costs.drafting_start, output_tokens)


def _compute_rate(
    costs: StreamCosts, step_seconds: float, tokens_per_step: float, start_seconds: float, output_tokens: float
) -> float:
    steps = (output_tokens - 1) / tokens_per_step
    return costs.num_streams * output_tokens / (costs.num_streams * start_seconds + steps * step_seconds)
