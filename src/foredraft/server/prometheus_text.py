"""Prometheus families of the server's metrics, under Foredraft's names and under vLLM's.

foredraft:X, vllm:X   with labels model_name and engine; X is vLLM's name if vLLM has the metric
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foredraft.drafters.failure_backoff import FAILURE_KINDS
from foredraft.engine.engine import Engine
from foredraft.server.metrics import ServerMetrics

OWN_PREFIX, VLLM_PREFIX = "foredraft", "vllm"


class MetricsPage(Collector):
    """Page of a server's metrics in Prometheus's text format, with its own registry.

    Args:
        list_metrics: returns the metrics of all models.
        list_families: returns further families, without the label of a model. Default none.
    """

    def __init__(
        self,
        list_metrics: Callable[[], Sequence[ServerMetrics]],
        list_families: Callable[[], Iterable[Metric]] = tuple,
    ) -> None:
        self._list_metrics, self._list_families = list_metrics, list_families
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """Render all metrics with their current values."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        return [*merge_families(map(build_families, self._list_metrics())), *self._list_families()]

    def describe(self) -> Iterable[Metric]:
        return []  # metric names are not declared at registration


def merge_families(pages: Iterable[Iterable[Metric]]) -> Iterable[Metric]:
    """Merge the families of several models, in the order of the first. Labels tell their samples apart."""
    merged: dict[str, Metric] = {}
    for family in (family for page in pages for family in page):
        if family.name in merged:
            merged[family.name].samples += family.samples
        else:
            merged[family.name] = family
    return merged.values()


def build_families(metrics: ServerMetrics) -> Iterator[Metric]:
    """Build all metric families with their current values."""
    prefixes = [OWN_PREFIX, VLLM_PREFIX] if metrics.has_vllm_names else [OWN_PREFIX]
    for prefix in prefixes:
        yield from _build_histograms(metrics, prefix)
        yield from _build_counters(metrics, prefix)
        yield from _build_labelled_counters(metrics, prefix)
        yield from _build_gauges(metrics, prefix)
    yield from _build_own_families(metrics)


def _build_histograms(m: ServerMetrics, prefix: str) -> Iterator[Metric]:
    families = {
        "time_to_first_token_seconds": (m.requests.ttft, "Seconds from arrival to the first token."),
        "inter_token_latency_seconds": (
            m.requests.inter_token_time,
            "Seconds between tokens; tokens that arrive together share the time.",
        ),
        "request_time_per_output_token_seconds": (m.requests.time_per_token, "Seconds of a request per output token."),
        "e2e_request_latency_seconds": (m.requests.e2e, "Seconds from arrival to the last token."),
        "request_queue_time_seconds": (m.requests.queue_time, "Seconds from arrival to the first step of a request."),
        "request_inference_time_seconds": (m.requests.inference_time, "Seconds from the first step to the last token."),
        "request_prompt_tokens": (m.requests.prompt_lengths, "Prompt tokens per request."),
        "request_generation_tokens": (m.requests.output_lengths, "Output tokens per request."),
        "request_params_n": (m.requests.samples, "Samples per prompt (parameter n)."),
        "iteration_tokens_total": (m.steps.rows, "Rows of one target pass: prompt, last and draft tokens."),
    }
    for name, (histogram, help_text) in families.items():
        yield histogram.build_family(f"{prefix}:{name}", help_text, m.labels)


def _build_counters(m: ServerMetrics, prefix: str) -> Iterator[Metric]:
    counters: dict[str, tuple[float, str]] = {
        "prompt_tokens": (m.tokens.prompt_tokens, "Prompt tokens of ended requests."),
        "prefix_cache_queries": (m.tokens.prefix_queries, "Prompt tokens looked up in the prefix cache."),
        "prefix_cache_hits": (m.tokens.prefix_hits, "Prompt tokens whose KV came from the prefix cache."),
        "generation_tokens": (m.tokens.generated_tokens, "Generated tokens."),
        "spec_decode_num_drafts": (m.tokens.num_drafts, "Verified drafts."),
        "spec_decode_num_draft_tokens": (m.tokens.drafted_tokens, "Draft tokens."),
        "spec_decode_num_accepted_tokens": (m.tokens.accepted_tokens, "Accepted draft tokens."),
    }
    if m.worker is not None:
        scheduler = m.worker.engine.scheduler
        counters["num_preemptions"] = (scheduler.num_preempted, "Preemptions; a preempted request is recomputed.")
    for name, (value, help_text) in counters.items():
        family = CounterMetricFamily(f"{prefix}:{name}", help_text, labels=list(m.labels))
        family.add_metric(list(m.labels.values()), value)
        yield family


def _build_labelled_counters(m: ServerMetrics, prefix: str) -> Iterator[Metric]:
    reasons = {reason: m.finish_counts[reason] for reason in ("stop", "length", "abort", "error")}
    yield _build_labelled_counter(
        m, f"{prefix}:request_success", "Ended requests by finish reason.", "finished_reason", reasons
    )
    accepted_at = {str(depth): count for depth, count in enumerate(m.tokens.accepted_at)} or {"0": 0}
    name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos"
    yield _build_labelled_counter(m, name, "Accepted draft tokens by depth.", "position", accepted_at)


def _build_gauges(m: ServerMetrics, prefix: str) -> Iterator[Metric]:
    if m.worker is None:
        return
    worker, allocator = m.worker, m.worker.engine.scheduler.allocator
    gauges = {
        "num_requests_running": (worker.num_running, "Running requests."),
        "num_requests_waiting": (worker.num_waiting, "Waiting requests."),
        "kv_cache_usage_perc": (allocator.num_used / (allocator.num_pages - 1), "Share of KV pages in use, 0 to 1."),
    }
    for name, (value, help_text) in gauges.items():
        yield _build_gauge(m, f"{prefix}:{name}", help_text, value)


def _build_own_families(m: ServerMetrics) -> Iterator[Metric]:
    """Build the families that vLLM does not have."""
    yield m.steps.step_time.build_family(
        f"{OWN_PREFIX}:step_time_seconds", "Seconds of a step, drafting included.", m.labels
    )
    yield m.steps.draft_time.build_family(
        f"{OWN_PREFIX}:draft_time_seconds", "Seconds of drafting in a step.", m.labels
    )
    if m.simulated_rate is not None:
        help_text = "Rate at which acceptance is simulated; requests that name a rule of their own are verified."
        yield _build_gauge(m, f"{OWN_PREFIX}:simulated_acceptance_rate", help_text, m.simulated_rate)
    failures = {kind: m.failures[kind] for kind in ("step", "request", "engine")}
    help_text = "Failed steps (step), requests ended as their cause (request), and failures of the engine (engine)."
    yield _build_labelled_counter(m, f"{OWN_PREFIX}:engine_failures", help_text, "kind", failures)
    engine: Engine | None = None if m.worker is None else m.worker.engine
    if engine is not None:
        yield from _build_length_families(m, engine)
        drafter = engine.drafter
        by_kind: dict[str, float] = {kind: drafter.failures[kind] for kind in FAILURE_KINDS}
        help_text = "Failures of the drafter by kind; they do not change output."
        yield _build_labelled_counter(m, f"{OWN_PREFIX}:drafter_failures", help_text, "kind", by_kind)
        by_name: Counter[str] = Counter()
        for backoff in drafter.backoffs:
            by_name[backoff.name] += backoff.failures.total()
        help_text = "Failures of the drafter by drafter or ensemble member."
        yield _build_labelled_counter(
            m, f"{OWN_PREFIX}:drafter_part_failures", help_text, "part", {k: n for k, n in by_name.items() if k or n}
        )
        num_quarantined = sum(backoff.is_quarantined for backoff in drafter.backoffs)
        help_text = "Drafters and ensemble members in quarantine after failures."
        yield _build_gauge(m, f"{OWN_PREFIX}:drafters_resting", help_text, num_quarantined)


def _build_length_families(m: ServerMetrics, engine: Engine) -> Iterator[Metric]:
    """Build the families about draft lengths. Policies without `counts` and `decision` report neutral values."""
    counts: Mapping[str, float] = getattr(engine.length_policy, "counts", {})
    name, help_text = f"{OWN_PREFIX}:draft_length_decisions", "Steps by the reason for their draft length."
    yield _build_labelled_counter(m, name, help_text, "reason", counts or {"fixed": m.steps.step_time.count})
    decision: Any = getattr(engine.length_policy, "decision", None)
    plain, rate = getattr(decision, "plain_rate", 0.0), getattr(decision, "rate", 0.0)
    help_text = "Predicted tokens per second with the best drafts over those without; 1 before the first estimate."
    yield _build_gauge(m, f"{OWN_PREFIX}:predicted_speedup", help_text, rate / plain if plain > 0 else 1.0)
    help_text = "Draft nodes granted in the last step."
    yield _build_gauge(m, f"{OWN_PREFIX}:draft_nodes", help_text, getattr(decision, "nodes", 0))


def _build_labelled_counter(
    m: ServerMetrics, name: str, help_text: str, label: str, counts: Mapping[str, float]
) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[*m.labels, label])
    for value, count in list(counts.items()):
        family.add_metric([*m.labels.values(), value], count)
    return family


def _build_gauge(m: ServerMetrics, name: str, help_text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=list(m.labels))
    family.add_metric(list(m.labels.values()), value)
    return family
