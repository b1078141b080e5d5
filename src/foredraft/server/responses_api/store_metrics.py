"""Prometheus families of the stored responses."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from foredraft.server.responses_api.response_store import ResponseStore


def build_store_families(store: ResponseStore) -> Iterator[Metric]:
    """Build the families with their current values."""
    yield GaugeMetricFamily("foredraft:stored_responses", "Stored responses.", len(store))
    yield GaugeMetricFamily("foredraft:stored_response_bytes", "Bytes of the stored responses.", store.num_bytes)
    help_text = "Stored responses that left to make room."
    yield CounterMetricFamily("foredraft:stored_responses_evicted", help_text, store.num_evicted)
