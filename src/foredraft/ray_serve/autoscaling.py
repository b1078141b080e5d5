"""Number of replicas from their load. Ray calls the function in its controller; the file does not import Ray."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

LOAD = "requests"  # name of the replicas' figure: running and waiting requests


class ScalingConfig(Protocol):
    """Part of Ray's AutoscalingConfig that is read here."""

    target_ongoing_requests: float


class ScalingContext(Protocol):
    """Part of Ray's AutoscalingContext that is read here."""

    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None  # figure -> replica -> mean of the last seconds
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    config: ScalingConfig


def scale_by_requests(context: ScalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas that the requests need, and an empty state.

    Ray's own policy counts Ray calls. Requests do not reach the replicas as such calls.
    """
    loads = (context.aggregated_metrics or {}).get(LOAD)
    if not loads:
        return context.target_num_replicas, {}
    needed = math.ceil(sum(loads.values()) / context.config.target_ongoing_requests)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(needed, high)), {}
