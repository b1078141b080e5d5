"""Queue of requests in scheduling order."""

from bisect import bisect_left, insort

from foredraft.request import Request


class RequestQueue(list[Request]):
    """Sorted requests: lower priority numbers first, then earlier arrivals."""

    def add(self, request: Request) -> None:
        """Insert a request in its position."""
        insort(self, request, key=get_queue_key)

    def take(self, request: Request) -> None:
        """Remove a request of the queue."""
        index = bisect_left(self, get_queue_key(request), key=get_queue_key)
        assert self[index] is request, "the sort key of a queued request changed"
        del self[index]

    def check_order(self) -> None:
        """Assert that the requests are in scheduling order."""
        assert self == sorted(self, key=get_queue_key), "requests are out of order"


def get_queue_key(request: Request) -> tuple[int, int]:
    """Return the sort key of a queue."""
    return request.spec.options.priority, request.arrival_index
