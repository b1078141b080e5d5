"""Number of replicas from their load."""

from types import SimpleNamespace

import pytest

from foredraft.ray_serve.autoscaling import LOAD, scale_by_requests


def context(loads: dict[str, float] | None, **changes) -> SimpleNamespace:
    values = {
        "aggregated_metrics": None if loads is None else {LOAD: loads},
        "target_num_replicas": 2,
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 4,
        "config": SimpleNamespace(target_ongoing_requests=8.0),
    }
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize(
    ("loads", "number"),
    [
        ({"a": 8.0, "b": 8.0}, 2),
        ({"a": 16.0, "b": 0.5}, 3),
        ({"a": 0.0, "b": 0.0}, 1),
        ({"a": 90.0}, 4),
    ],
)
def test_the_requests_are_divided_by_the_load_that_is_aimed_at(loads: dict[str, float], number: int):
    assert scale_by_requests(context(loads)) == (number, {})


@pytest.mark.parametrize("loads", [None, {}])
def test_without_figures_the_number_stays(loads: dict[str, float] | None):
    """Fault: replicas that have not reported yet would be removed."""
    assert scale_by_requests(context(loads)) == (2, {})
