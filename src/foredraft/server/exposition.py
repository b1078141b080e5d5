"""The figures as Prometheus families, each under our name and, where vLLM has it, under vLLM's."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from foredraft.drafters.probation import KINDS
from foredraft.engine.engine import Engine

if TYPE_CHECKING:
    from foredraft.server.metrics import Metrics

OURS, THEIRS = "foredraft", "vllm"


def families(metrics: "Metrics") -> Iterator[Metric]:
    prefixes = [OURS, THEIRS] if metrics.has_vllm_names else [OURS]
    for prefix in prefixes:
        yield from _histograms(metrics, prefix)
        yield from _counters(metrics, prefix)
        yield from _by_label(metrics, prefix)
        yield from _gauges(metrics, prefix)
    yield from _own(metrics)


def _histograms(m: "Metrics", prefix: str) -> Iterator[Metric]:
    shown = {
        "time_to_first_token_seconds": (m.ttft, "From arrival to the first token."),
        "inter_token_latency_seconds": (m.gap, "Between tokens; those that come together share the time."),
        "request_time_per_output_token_seconds": (m.per_token, "Time of a request by its tokens."),
        "e2e_request_latency_seconds": (m.e2e, "From arrival to the last token."),
        "request_queue_time_seconds": (m.queue, "From arrival until the request first ran."),
        "request_inference_time_seconds": (m.inference, "From the first run to the last token."),
        "request_prompt_tokens": (m.prompt_size, "Tokens of a prompt."),
        "request_generation_tokens": (m.output_size, "Tokens of an output."),
        "request_params_n": (m.samples, "Samples asked for."),
        "iteration_tokens_total": (m.rows, "Rows of one pass of the target: prompt, last tokens and drafts."),
    }
    for name, (histogram, what) in shown.items():
        yield histogram.family(f"{prefix}:{name}", what, m.labels)


def _counters(m: "Metrics", prefix: str) -> Iterator[Metric]:
    shown: dict[str, tuple[float, str]] = {
        "prompt_tokens": (m.prompt_tokens, "Tokens of the prompts of ended requests."),
        "prefix_cache_queries": (m.looked_up, "Prompt tokens looked up in the prefix cache."),
        "prefix_cache_hits": (m.found, "Prompt tokens found there."),
        "generation_tokens": (m.generated, "Tokens generated."),
        "spec_decode_num_drafts": (m.drafts, "Drafts verified."),
        "spec_decode_num_draft_tokens": (m.drafted, "Tokens drafted."),
        "spec_decode_num_accepted_tokens": (m.accepted, "Drafted tokens kept."),
    }
    if m.worker is not None:
        scheduler = m.worker.engine.scheduler
        shown["num_preemptions"] = (scheduler.num_preempted, "Requests that gave way and were computed again.")
    for name, (value, what) in shown.items():
        family = CounterMetricFamily(f"{prefix}:{name}", what, labels=list(m.labels))
        family.add_metric(list(m.labels.values()), value)
        yield family


def _by_label(m: "Metrics", prefix: str) -> Iterator[Metric]:
    ended = {reason: m.ended[reason] for reason in ("stop", "length", "abort", "error")}
    yield _labelled(m, f"{prefix}:request_success", "Requests by how they ended.", "finished_reason", ended)
    at = {str(depth): count for depth, count in enumerate(m.accepted_at)} or {"0": 0}
    name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos"
    yield _labelled(m, name, "Drafted tokens kept, by depth.", "position", at)


def _gauges(m: "Metrics", prefix: str) -> Iterator[Metric]:
    if m.worker is None:
        return
    worker, allocator = m.worker, m.worker.engine.scheduler.allocator
    shown = {
        "num_requests_running": (worker.num_running, "Requests that run."),
        "num_requests_waiting": (worker.num_waiting, "Requests that wait."),
        "kv_cache_usage_perc": (allocator.num_used / (allocator.num_pages - 1), "Pages in use, 1 = all."),
    }
    for name, (value, what) in shown.items():
        yield _gauge(m, f"{prefix}:{name}", what, value)


def _own(m: "Metrics") -> Iterator[Metric]:
    """What vLLM has no name for."""
    yield m.step_time.family(f"{OURS}:step_time_seconds", "One step, drafting included.", m.labels)
    yield m.draft_time.family(f"{OURS}:draft_time_seconds", "The drafter's part of a step.", m.labels)
    resets = {what: m.failures[what] for what in ("step", "request", "engine")}
    yield _labelled(m, f"{OURS}:engine_failures", "Steps taken back, requests ended for it, engines.", "kind", resets)
    engine: Engine | None = None if m.worker is None else m.worker.engine
    if engine is not None:
        yield from _decisions(m, engine)
        drafter = engine.drafter
        shown: dict[str, float] = {kind: drafter.failures[kind] for kind in KINDS}
        yield _labelled(m, f"{OURS}:drafter_failures", "What a drafter did wrong; output is unchanged.", "kind", shown)
        parts: Counter[str] = Counter()
        for probation in drafter.probations:
            parts[probation.name] += probation.failures.total()
        what = "The same by the drafter, or the part of one, that failed."
        yield _labelled(m, f"{OURS}:drafter_part_failures", what, "part", {k: n for k, n in parts.items() if k or n})
        resting = sum(probation.is_resting for probation in drafter.probations)
        yield _gauge(m, f"{OURS}:drafters_resting", "Drafters, and parts of one, that rest after failures.", resting)


def _decisions(m: "Metrics", engine: Engine) -> Iterator[Metric]:
    """How long drafts were and why, where somebody decides."""
    counts: Mapping[str, float] = getattr(engine.lengths, "counts", {})
    name, what = f"{OURS}:draft_length_decisions", "Steps by why their drafts were as long as they were."
    yield _labelled(m, name, what, "reason", counts or {"fixed": m.step_time.count})
    decision: Any = getattr(engine.lengths, "decision", None)
    plain, rate = getattr(decision, "plain_rate", 0.0), getattr(decision, "rate", 0.0)
    what = "Tokens per second that the best drafts should bring, over those without; 1 before anything is known."
    yield _gauge(m, f"{OURS}:predicted_speedup", what, rate / plain if plain > 0 else 1.0)
    yield _gauge(m, f"{OURS}:draft_nodes", "Nodes granted in the last step.", getattr(decision, "nodes", 0))


def _labelled(m: "Metrics", name: str, what: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, what, labels=[*m.labels, label])
    for value, count in list(counts.items()):
        family.add_metric([*m.labels.values(), value], count)
    return family


def _gauge(m: "Metrics", name: str, what: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, what, labels=list(m.labels))
    family.add_metric(list(m.labels.values()), value)
    return family
