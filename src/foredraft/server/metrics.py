"""What a server tells Prometheus: under our own names, and the same figures under vLLM's.

    foredraft:X, vllm:X   with labels model_name and engine; names are vLLM's where vLLM has the figure

Recorded per step and per request, never per token; nothing that goes wrong here reaches a request. The loop writes what
clients see (first token, time between tokens), the engine's thread the rest.
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from foredraft.controller import StepReport
from foredraft.engine.engine import Engine
from foredraft.engine.output import Transcript
from foredraft.request import Request
from foredraft.server import exposition
from foredraft.server.figures import ROWS, SAMPLES, SECONDS, STEP_SECONDS, TOKENS, Histogram

if TYPE_CHECKING:
    from foredraft.engine.worker import Worker


class Metrics(Collector):
    """An Observer of the worker, and what /metrics shows; a registry of its own."""

    def __init__(self, model: str, has_vllm_names: bool) -> None:
        self.labels = {"model_name": model, "engine": "0"}
        self.has_vllm_names = has_vllm_names
        self.worker: Worker | None = None
        self.registry = CollectorRegistry()
        self.ttft, self.gap, self.per_token = Histogram(SECONDS), Histogram(SECONDS), Histogram(SECONDS)
        self.e2e, self.queue, self.inference = Histogram(SECONDS), Histogram(SECONDS), Histogram(SECONDS)
        self.prompt_size, self.output_size = Histogram(TOKENS), Histogram(TOKENS)
        self.samples, self.rows = Histogram(SAMPLES), Histogram(ROWS)
        self.step_time, self.draft_time = Histogram(STEP_SECONDS), Histogram(STEP_SECONDS)
        self.prompt_tokens = self.generated = 0
        self.drafts = self.drafted = self.accepted = 0
        self.accepted_at: list[int] = []
        self.ended: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.looked_up = self.found = 0  # tokens, in the prefix cache
        self._begun: dict[Request, float] = {}  # who runs -> since when
        self.registry.register(self)

    def watch(self, worker: "Worker") -> None:
        self.worker = worker

    def stepped(self, engine: Engine, report: StepReport) -> None:
        """On the engine's thread."""
        self.step_time.observe(report.step_time)
        self.draft_time.observe(report.draft_time)
        self.rows.observe(report.num_rows)
        for outcome in report.outcomes:
            kept = len(outcome.accepted)
            self.generated += 1 + kept
            if outcome.drafted:
                self.drafts += 1
                self.drafted += outcome.drafted
                self.accepted += kept
                self.accepted_at += [0] * (kept - len(self.accepted_at))
                for depth in range(kept):
                    self.accepted_at[depth] += 1
        began = time.perf_counter() - report.step_time
        for request in engine.tried:
            self._begun.setdefault(request, began)

    def finished(self, transcript: Transcript) -> None:
        """On the engine's thread."""
        request, stats = transcript.request, transcript.stats()
        self.ended[transcript.finish_reason or "abort"] += 1
        is_first = request.sample == 0  # the samples of a prompt share it
        if is_first:
            self.prompt_tokens += request.num_given
            self.prompt_size.observe(request.num_given)
            self.samples.observe(request.sampling.n)
        self.output_size.observe(transcript.num_tokens)
        self.e2e.observe(stats.wall_time)
        begun = self._begun.pop(request, None)
        if begun is not None:
            self.queue.observe(max(begun - transcript.started, 0.0))
            self.inference.observe(time.perf_counter() - begun)
            self.looked_up += len(request.prompt)
            self.found += request.num_cached or 0
        if transcript.num_tokens > 1:
            self.per_token.observe(stats.wall_time / transcript.num_tokens)

    def failed(self, what: str) -> None:
        """On the engine's thread."""
        self.failures[what] += 1

    def first_token(self, seconds: float) -> None:
        """On the loop: from the request's arrival."""
        self.ttft.observe(seconds)

    def more_tokens(self, seconds: float, count: int) -> None:
        """On the loop: `count` tokens came together, `seconds` after those before them."""
        self.gap.observe(seconds / count, count)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        return exposition.families(self)

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is collected before somebody asks
