"""Metrics of a server: counts and histograms, which `prometheus_text.py` renders.

Values are recorded per step and per request, never per token. Errors here do not affect requests. The event loop
records latencies that clients see (first token, time between tokens); the engine's thread records the rest.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from foredraft.draft_length.policy import DraftOutcome, StepReport
from foredraft.engine.transcript import Transcript
from foredraft.request import Request
from foredraft.server.histogram import (
    LATENCY_BUCKETS,
    ROW_BUCKETS,
    SAMPLE_BUCKETS,
    STEP_TIME_BUCKETS,
    TOKEN_BUCKETS,
    Histogram,
)

if TYPE_CHECKING:
    from foredraft.engine.worker import Worker


@dataclass(frozen=True)
class RequestHistograms:
    """Times and sizes of requests; times in seconds."""

    ttft: Histogram = field(default_factory=partial(Histogram, LATENCY_BUCKETS))
    inter_token_time: Histogram = field(default_factory=partial(Histogram, LATENCY_BUCKETS))
    time_per_token: Histogram = field(default_factory=partial(Histogram, LATENCY_BUCKETS))
    e2e: Histogram = field(default_factory=partial(Histogram, LATENCY_BUCKETS))
    queue_time: Histogram = field(default_factory=partial(Histogram, LATENCY_BUCKETS))
    inference_time: Histogram = field(default_factory=partial(Histogram, LATENCY_BUCKETS))
    prompt_lengths: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS))
    output_lengths: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS))
    samples: Histogram = field(default_factory=partial(Histogram, SAMPLE_BUCKETS))


@dataclass(frozen=True)
class StepHistograms:
    """Times and sizes of steps; times in seconds."""

    rows: Histogram = field(default_factory=partial(Histogram, ROW_BUCKETS))
    step_time: Histogram = field(default_factory=partial(Histogram, STEP_TIME_BUCKETS))
    draft_time: Histogram = field(default_factory=partial(Histogram, STEP_TIME_BUCKETS))


@dataclass
class TokenCounts:
    """Numbers of tokens since the start of the server."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)  # by depth
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found there

    def count_step(self, outcome: DraftOutcome) -> None:
        """Count the tokens of one request in a step."""
        num_accepted = len(outcome.accepted_nodes)
        self.generated_tokens += 1 + num_accepted
        if outcome.num_drafted:
            self.num_drafts += 1
            self.drafted_tokens += outcome.num_drafted
            self.accepted_tokens += num_accepted
            self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
            for depth in range(num_accepted):
                self.accepted_at[depth] += 1


class ServerMetrics:
    """EngineObserver of the worker: records steps, requests and failures.

    Args:
        model: value of the label model_name.
        has_vllm_names: report all metrics under vLLM's names too.
    """

    def __init__(self, model: str, has_vllm_names: bool) -> None:
        self.labels = {"model_name": model, "engine": "0"}
        self.has_vllm_names = has_vllm_names
        self.worker: Worker | None = None
        self.simulated_rate: float | None = None
        self.requests, self.steps, self.tokens = RequestHistograms(), StepHistograms(), TokenCounts()
        self.finish_counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._start_times: dict[Request, float] = {}  # running request -> start of its first step, time.perf_counter
        self._by_adapter: dict[str, ServerMetrics] = {}  # replaced as a whole

    def attach_worker(self, worker: "Worker", simulated_rate: float | None) -> None:
        """Report on a worker.

        Args:
            worker: worker of the loaded model.
            simulated_rate: rate at which acceptance is simulated; None = drafts are verified.
        """
        self.worker, self.simulated_rate = worker, simulated_rate

    def detach_worker(self) -> None:
        """Drop the worker, which holds the metrics as its observer: the model is freed without the cyclic collector."""
        self.worker = None

    def add_adapter(self, name: str, metrics: "ServerMetrics") -> None:
        """Let the requests of an adapter in the same engine count in metrics of its own; the steps count here."""
        self._by_adapter = {**self._by_adapter, name: metrics}

    def remove_adapter(self, name: str) -> None:
        """Count the remaining requests of an adapter here."""
        self._by_adapter = {other: metrics for other, metrics in self._by_adapter.items() if other != name}

    def _find_owner(self, request: Request) -> "ServerMetrics":
        adapter = request.spec.adapter
        return self if adapter is None else self._by_adapter.get(adapter.name, self)

    def on_step(self, requests: Sequence[Request], report: StepReport) -> None:
        """Record a step. Runs on the engine's thread."""
        self.steps.step_time.observe(report.step_time)
        self.steps.draft_time.observe(report.draft_time)
        self.steps.rows.observe(report.num_pass_tokens)
        adapters = self._by_adapter
        owners = {request.slot: self._find_owner(request) for request in requests} if adapters else {}
        for outcome in report.outcomes:
            owners.get(outcome.slot, self).tokens.count_step(outcome)
        step_start = time.perf_counter() - report.step_time
        for request in requests:
            self._start_times.setdefault(request, step_start)

    def on_finish(self, transcript: Transcript) -> None:
        """Record an ended request. Runs on the engine's thread."""
        request = transcript.request
        self._find_owner(request).record_end(transcript, self._start_times.pop(request, None))

    def record_end(self, transcript: Transcript, first_run: float | None) -> None:
        """Record an ended request of this model.

        Args:
            transcript: of the request.
            first_run: start of its first step (time.perf_counter); None = it did not run.
        """
        request, stats = transcript.request, transcript.build_stats()
        spec = request.spec
        self.finish_counts[transcript.finish_reason or "abort"] += 1
        is_first = spec.sample_index == 0  # a prompt counts once for all its samples
        if is_first:
            self.tokens.prompt_tokens += len(spec.input_tokens)
            self.requests.prompt_lengths.observe(len(spec.input_tokens))
            self.requests.samples.observe(spec.sampling.n)
        self.requests.output_lengths.observe(transcript.num_tokens)
        self.requests.e2e.observe(stats.wall_time)
        if first_run is not None:
            self.requests.queue_time.observe(max(first_run - transcript.stats_recorder.start_time, 0.0))
            self.requests.inference_time.observe(time.perf_counter() - first_run)
            self.tokens.prefix_queries += len(spec.prompt)
            self.tokens.prefix_hits += request.num_cached_tokens or 0
        if transcript.num_tokens > 1:
            self.requests.time_per_token.observe(stats.wall_time / transcript.num_tokens)

    def on_failure(self, kind: str) -> None:
        """Record a failure by kind. Runs on the engine's thread."""
        self.failures[kind] += 1

    def record_first_token(self, seconds: float) -> None:
        """Record the seconds from arrival to the first token. Runs on the event loop."""
        self.requests.ttft.observe(seconds)

    def record_tokens(self, seconds: float, count: int) -> None:
        """Record `count` tokens that arrived together, `seconds` after the previous ones. Runs on the event loop."""
        self.requests.inter_token_time.observe(seconds / count, count)
