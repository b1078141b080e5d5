"""Time budget for grammar masks.

Masks are computed on the engine's thread. Without a budget, one request with a slow grammar would delay all others.
"""

from collections.abc import Sequence

from foredraft.request import Request, RequestStatus

FREE_SECONDS = 0.002  # seconds of mask time per request and step without debt; ordinary grammars take a tenth of it
MASK_TIME_SHARE = 0.5  # seconds of debt repaid per second of other work
BURST_SECONDS = 0.05  # seconds of debt forgiven at once if no other request can run
_NO_REQUESTS: frozenset[Request] = frozenset()


class MaskBudget:
    """Mask-time debts of requests. A request with a debt is deferred until the debt is repaid.

    A request's debt grows by its mask time above FREE_SECONDS in a step; masks computed before it was queued count too.
    Each step repays MASK_TIME_SHARE of its other work, the oldest debt first. If no other request can run, debts are
    forgiven. Slow grammars thus take a bounded share of the time, and every request finishes. Deferring a request does
    not change its output.
    """

    def __init__(self) -> None:
        self._debts: dict[Request, float] = {}  # seconds, all above zero; oldest debt first

    def add_request(self, request: Request) -> None:
        """Register a request and charge the masks that were computed before it was queued."""
        if request.matcher is not None:
            self._add_debt(request, request.matcher.take_seconds())

    def find_deferred(self) -> frozenset[Request]:
        """Return the requests that are deferred in the next step."""
        if not self._debts:
            return _NO_REQUESTS
        for request in [request for request in self._debts if request.status is RequestStatus.FINISHED]:
            del self._debts[request]
        return frozenset(self._debts)

    def release_deferred(self, allowed: frozenset[Request] | None) -> bool:
        """Forgive debts of up to BURST_SECONDS, because no other request can run. Returns False if there are none.

        Args:
            allowed: requests that may run. None = all.
        """
        deferred = [request for request in self._debts if allowed is None or request in allowed]
        left = BURST_SECONDS
        for request in deferred:
            if left < BURST_SECONDS and self._debts[request] > left:
                break
            left -= self._debts.pop(request)
            if left <= 0:
                break
        return bool(deferred)

    def record_step(self, requests: Sequence[Request], seconds: float) -> None:
        """Repay debts after a step, then charge its masks.

        Args:
            requests: requests of the step.
            seconds: duration of the step, masks included.
        """
        constrained = [request for request in requests if request.matcher is not None]
        if not constrained and not self._debts:
            return
        times = [(request, request.matcher.take_seconds()) for request in constrained if request.matcher is not None]
        self._reduce_debts(MASK_TIME_SHARE * max(seconds - sum(spent for _, spent in times), 0.0))
        for request, spent in times:
            self._add_debt(request, spent)

    def _reduce_debts(self, seconds: float) -> None:
        for request, debt in list(self._debts.items()):
            if debt > seconds:
                self._debts[request] = debt - seconds
                return
            seconds -= debt
            del self._debts[request]

    def _add_debt(self, request: Request, spent: float) -> None:
        if spent > FREE_SECONDS and request.status is not RequestStatus.FINISHED:
            self._debts[request] = self._debts.get(request, 0.0) + spent - FREE_SECONDS
