"""Intervals in steps: the lifetime of a plan, and the distance between plain steps that measure the plain cost."""

LARGE_BATCH = 16  # number of requests from which a batch is large
# Lifetime of a plan: steps until a new one is computed. It limits the time that the policy itself takes.
SMALL_BATCH_LIFETIME = 16
LARGE_BATCH_LIFETIME = 32
CHANGED_BATCH_LIFETIME = 8  # of a large batch that has changed since the plan was computed
COVERED_BATCH_LIFETIME = 4  # of a small batch that has changed, but has no request that is not in the plan
PAUSED_LIFETIME = 32  # while drafting is paused: of any batch, changed or not, without a new kind of request
RESUMPTION_INTERVAL = 8  # while drafting is paused though a plan pays: steps between two looks at the time credit
# While requests draft, some steps are plain, to measure the cost of plain decoding again. They lose at most 0.5 % of
# the tokens (docs/controller.md, "Estimates").
PLAIN_INTERVAL_PER_GAIN = 200  # steps between two plain steps, for a gain of 1; proportional to the gain
MIN_PLAIN_INTERVAL = 16
MAX_PLAIN_INTERVAL = 256


def get_plan_lifetime(num_requests: int, is_paused: bool, is_same_batch: bool, is_covered: bool) -> int:
    """Return the lifetime of a plan in steps; 0 = a new plan is computed at once.

    Args:
        num_requests: adjustable requests of the batch.
        is_paused: drafting is paused. The plan then only has to show whether drafting would pay.
        is_same_batch: the batch is the one that the plan was computed for.
        is_covered: the plan has nodes for every request of the batch.
    """
    if is_paused:
        return PAUSED_LIFETIME
    # A large batch changes often, so its plan is kept through changes. A request that joins it has no draft until the
    # next plan.
    if num_requests >= LARGE_BATCH:
        return LARGE_BATCH_LIFETIME if is_same_batch else CHANGED_BATCH_LIFETIME
    if not is_covered:
        return 0
    return SMALL_BATCH_LIFETIME if is_same_batch else COVERED_BATCH_LIFETIME


def compute_plain_interval(gain: float) -> float:
    """Return the number of steps with drafts between two plain steps, for a predicted gain."""
    return min(max(PLAIN_INTERVAL_PER_GAIN * gain, MIN_PLAIN_INTERVAL), MAX_PLAIN_INTERVAL)
