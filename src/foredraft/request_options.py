"""Options of a request other than its sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.errors import ForedraftError
from foredraft.verification.rule import Rule


@dataclass(frozen=True)
class RequestOptions:
    """Options of a request other than its sampling parameters.

    Raises:
        ForedraftError: a value has the wrong type or is out of range. A wrong prediction or rule raises later, when the
            request is made.
    """

    priority: int = 0  # lower runs first and is preempted last
    num_speculative_tokens: int | None = None  # fixed draft length; 0 = plain decoding; None = the policy decides
    prediction: str | Sequence[int] = ()  # expected output, text or token ids, to draft from
    salt: bytes = b""  # only requests with equal salts share prefix pages and past outputs
    is_traced: bool = False  # every delta holds the trees of its steps
    verify: str | Rule | None = None  # verification rule or its name; None = that of the LLM
    skip_special_tokens: bool = True  # leave special tokens out of the text; the end token is never part of it
    shown_tokens: tuple[int, ...] = ()  # special tokens whose names are part of the text nevertheless

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
            raise ForedraftError(f"num_speculative_tokens must be an integer from 0 up or None, got {count!r:.80}")
        types = {"priority": int, "salt": bytes, "is_traced": bool, "skip_special_tokens": bool, "shown_tokens": tuple}
        for name, kind in types.items():
            if not isinstance(value := getattr(self, name), kind) or (kind is int and isinstance(value, bool)):
                raise ForedraftError(f"{name} must be of type {kind.__name__}, got {value!r:.80}")
