"""Options of a request other than its sampling parameters."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestOptions:
    """Options of a request other than its sampling parameters."""

    priority: int = 0  # lower runs first and is preempted last
    num_speculative_tokens: int | None = None  # fixed draft length; 0 = no draft; None = the policy decides
    prediction: tuple[int, ...] = ()  # expected output tokens, to draft from
    salt: bytes = b""  # only requests with equal salts share prefix pages and past outputs
    is_traced: bool = False  # every delta holds the trees of its steps
