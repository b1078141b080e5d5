"""Whose grammar masks are made in a step. They are made on the engine's thread, so without a budget one request with a
grammar that is slow to follow would hold up every other."""

from collections.abc import Sequence

from foredraft.request import Request, State

FREE = 0.002  # seconds of masks that a request may take in a step: an ordinary grammar takes a tenth of it
SHARE = 0.5  # seconds of masks above that, of all requests together, per second of everything else
BURST = 0.05  # seconds of debt that are let off at once if nothing else can run
_NOTHING: frozenset[Request] = frozenset()


class MaskBudget:
    """Debts of seconds. What a request's masks take above `FREE` in a step is its debt, and it sits out the steps until
    that is paid; what its first masks took before it was queued counts too.

    Each step pays `SHARE` of its other work, to the request that has waited the longest first, so that they come back
    one by one. If nothing else can run, no request is held up and debts are let off. So the masks of slow grammars take
    a bounded part of the time, and every request goes on in the end. Which steps a request runs in changes no text.
    """

    def __init__(self) -> None:
        self._debts: dict[Request, float] = {}  # seconds, above zero; who has waited the longest is first

    def enter(self, request: Request) -> None:
        """A new request."""
        if request.matcher is not None:
            self._charge(request, request.matcher.take_seconds())

    def resting(self) -> frozenset[Request]:
        """Who sits out the next step."""
        if not self._debts:
            return _NOTHING
        for request in [request for request in self._debts if request.state is State.OVER]:
            del self._debts[request]
        return frozenset(self._debts)

    def let_off(self, only: frozenset[Request] | None) -> bool:
        """Let some go on that sit out, of `only` these: nothing else can run. False if there is none."""
        some = [request for request in self._debts if only is None or request in only]
        left = BURST
        for request in some:
            if left < BURST and self._debts[request] > left:
                break
            left -= self._debts.pop(request)
            if left <= 0:
                break
        return bool(some)

    def settle(self, requests: Sequence[Request], seconds: float) -> None:
        """After a step of these requests that took so long, masks included."""
        takers = [request for request in requests if request.matcher is not None]
        if not takers and not self._debts:
            return
        taken = [(request, request.matcher.take_seconds()) for request in takers if request.matcher is not None]
        self._pay(SHARE * max(seconds - sum(spent for _, spent in taken), 0.0))
        for request, spent in taken:
            self._charge(request, spent)

    def _pay(self, seconds: float) -> None:
        for request, owed in list(self._debts.items()):
            if owed > seconds:
                self._debts[request] = owed - seconds
                return
            seconds -= owed
            del self._debts[request]

    def _charge(self, request: Request, spent: float) -> None:
        if spent > FREE and request.state is not State.OVER:
            self._debts[request] = self._debts.get(request, 0.0) + spent - FREE
