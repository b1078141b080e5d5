"""Metrics of a server for Prometheus, under Foredraft's names and under vLLM's.

    foredraft:X, vllm:X   with labels model_name and engine; X is vLLM's name if vLLM has the metric

Values are recorded per step and per request, never per token. Errors here do not affect requests. The event loop
records latencies that clients see (first token, time between tokens); the engine's thread records the rest.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from foredraft.draft_length.policy import StepReport
from foredraft.engine.transcript import Transcript
from foredraft.request import Request
from foredraft.server import prometheus_text
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


class ServerMetrics(Collector):
    """EngineObserver of the worker and Prometheus collector, with its own registry.

    Args:
        model: value of the label model_name.
        has_vllm_names: report all metrics under vLLM's names too.
    """

    def __init__(self, model: str, has_vllm_names: bool) -> None:
        self.labels = {"model_name": model, "engine": "0"}
        self.has_vllm_names = has_vllm_names
        self.worker: Worker | None = None
        self.registry = CollectorRegistry()
        self.ttft, self.inter_token_time, self.time_per_token = (
            Histogram(LATENCY_BUCKETS),
            Histogram(LATENCY_BUCKETS),
            Histogram(LATENCY_BUCKETS),
        )
        self.e2e, self.queue_time, self.inference_time = (
            Histogram(LATENCY_BUCKETS),
            Histogram(LATENCY_BUCKETS),
            Histogram(LATENCY_BUCKETS),
        )
        self.prompt_lengths, self.output_lengths = Histogram(TOKEN_BUCKETS), Histogram(TOKEN_BUCKETS)
        self.samples, self.rows = Histogram(SAMPLE_BUCKETS), Histogram(ROW_BUCKETS)
        self.step_time, self.draft_time = Histogram(STEP_TIME_BUCKETS), Histogram(STEP_TIME_BUCKETS)
        self.prompt_tokens = self.generated_tokens = 0
        self.num_drafts = self.drafted_tokens = self.accepted_tokens = 0
        self.accepted_at: list[int] = []
        self.finish_counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.prefix_queries = self.prefix_hits = 0  # prompt tokens looked up and hit in the prefix cache
        self._start_times: dict[Request, float] = {}  # running request -> start of its first step, time.perf_counter
        self.registry.register(self)

    def attach_worker(self, worker: "Worker") -> None:
        self.worker = worker

    def on_step(self, requests: Sequence[Request], report: StepReport) -> None:
        """Record a step. Runs on the engine's thread."""
        self.step_time.observe(report.step_time)
        self.draft_time.observe(report.draft_time)
        self.rows.observe(report.num_pass_tokens)
        for outcome in report.outcomes:
            num_accepted = len(outcome.accepted_nodes)
            self.generated_tokens += 1 + num_accepted
            if outcome.num_drafted:
                self.num_drafts += 1
                self.drafted_tokens += outcome.num_drafted
                self.accepted_tokens += num_accepted
                self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
                for depth in range(num_accepted):
                    self.accepted_at[depth] += 1
        step_start = time.perf_counter() - report.step_time
        for request in requests:
            self._start_times.setdefault(request, step_start)

    def on_finish(self, transcript: Transcript) -> None:
        """Record an ended request. Runs on the engine's thread."""
        request, stats = transcript.request, transcript.build_stats()
        self.finish_counts[transcript.finish_reason or "abort"] += 1
        is_first = request.sample_index == 0  # a prompt counts once for all its samples
        if is_first:
            self.prompt_tokens += request.num_input_tokens
            self.prompt_lengths.observe(request.num_input_tokens)
            self.samples.observe(request.sampling.n)
        self.output_lengths.observe(transcript.num_tokens)
        self.e2e.observe(stats.wall_time)
        first_run = self._start_times.pop(request, None)
        if first_run is not None:
            self.queue_time.observe(max(first_run - transcript.start_time, 0.0))
            self.inference_time.observe(time.perf_counter() - first_run)
            self.prefix_queries += len(request.prompt)
            self.prefix_hits += request.num_cached_tokens or 0
        if transcript.num_tokens > 1:
            self.time_per_token.observe(stats.wall_time / transcript.num_tokens)

    def on_failure(self, kind: str) -> None:
        """Record a failure by kind. Runs on the engine's thread."""
        self.failures[kind] += 1

    def record_first_token(self, seconds: float) -> None:
        """Record the seconds from arrival to the first token. Runs on the event loop."""
        self.ttft.observe(seconds)

    def record_tokens(self, seconds: float, count: int) -> None:
        """Record `count` tokens that arrived together, `seconds` after the previous ones. Runs on the event loop."""
        self.inter_token_time.observe(seconds / count, count)

    def render(self) -> bytes:
        """Render all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        return prometheus_text.build_families(self)

    def describe(self) -> Iterable[Metric]:
        return []  # metric names are not declared at registration
