"""Cheap histograms for metrics: recording a value is one list update; Prometheus families are built on request.

Each histogram is written by one thread. A reader on another thread may see slightly old values.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import HistogramMetricFamily

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
STEP_TIME_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
TOKEN_BUCKETS = (
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
    200.0,
    500.0,
    1000.0,
    2000.0,
    5000.0,
    10000.0,
    20000.0,
    50000.0,
)
ROW_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)
SAMPLE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """Counts of values by bucket, and their sum. The last bucket has no upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Record a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def build_family(self, name: str, help_text: str, labels: dict[str, str]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, help_text, labels=list(labels))
        family.add_metric(list(labels.values()), list(self._accumulate_buckets()), self.total)
        return family

    def _accumulate_buckets(self) -> Iterator[tuple[str, float]]:
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            yield bound, running
