"""Intervals in steps: lifetimes of plans, reports of a pause, and the distance between runs of plain steps."""

LARGE_BATCH = 16  # number of requests from which a batch is large
# Lifetime of a plan: steps until a new one is computed. It limits the time that the policy itself takes.
SMALL_BATCH_LIFETIME = 16
LARGE_BATCH_LIFETIME = 32
CHANGED_BATCH_LIFETIME = 8  # of a batch that has changed since the plan was computed
MAX_AGE_SHARE = 4  # the first plans are at most a quarter as old as the policy: the evidence grows fast
PAUSED_LIFETIME = 32  # while drafting is paused: of any batch, changed or not, without a new kind of request or a probe
LONG_PAUSED_LIFETIME = 128  # the same, once it has been paused for a while
SKIPPED_REPORTS, LONG_SKIPPED_REPORTS = 15, 63  # in a row during a pause, and once it has lasted for a while
RESUMPTION_INTERVAL = 8  # while drafting is paused though a plan pays: steps between two looks at the time credit
# While requests draft, runs of plain steps measure the cost of plain decoding again. They lose at most 1 % of
# the tokens (docs/controller.md, "Estimates").
PLAIN_INTERVAL_PER_GAIN = 100  # steps between two runs per step of a run and gain of 1
MIN_PLAIN_INTERVAL = 64
MAX_PLAIN_INTERVAL = 1024


def get_plan_lifetime(num_requests: int, num_steps: int, is_same_batch: bool, is_comparable: bool) -> int:
    """Return the lifetime of a plan in steps while requests draft; 0 = a new plan is computed at once.

    Args:
        num_requests: adjustable requests of the batch.
        num_steps: steps since the start of the policy.
        is_same_batch: the batch is the one that the plan was computed for.
        is_comparable: the plan has nodes for requests like those of the batch.
    """
    is_large = num_requests >= LARGE_BATCH
    longest = num_steps // MAX_AGE_SHARE
    if is_same_batch:
        return min(LARGE_BATCH_LIFETIME if is_large else SMALL_BATCH_LIFETIME, longest)
    # A large batch changes often, so its plan is kept through changes.
    return min(CHANGED_BATCH_LIFETIME, longest) if is_comparable or is_large else 0


def may_hold(num_steps: int) -> bool:
    """Return whether decisions may be repeated without a look at the plan; False while plans live for a few steps."""
    return num_steps >= MAX_AGE_SHARE * SMALL_BATCH_LIFETIME


def get_paused_lifetime(is_paused_long: bool) -> int:
    """Return the lifetime of a plan in steps while drafting is paused. It only shows whether drafting would pay."""
    return LONG_PAUSED_LIFETIME if is_paused_long else PAUSED_LIFETIME


def get_skipped_reports(is_paused_long: bool) -> int:
    """Return the number of reports in a row that may be skipped while drafting is paused, because they take time."""
    return LONG_SKIPPED_REPORTS if is_paused_long else SKIPPED_REPORTS


def compute_plain_interval(gain: float, num_run_steps: int, confidence: float = 1.0) -> float:
    """Return the number of steps with drafts between two runs of plain steps.

    Args:
        gain: predicted gain of drafts.
        num_run_steps: steps of a run.
        confidence: how well the time of a plain step is known, from 0 to 1.
    """
    return max(min(PLAIN_INTERVAL_PER_GAIN * num_run_steps * gain, MAX_PLAIN_INTERVAL) * confidence, MIN_PLAIN_INTERVAL)
