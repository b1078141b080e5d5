"""Options of a request other than its sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from foredraft.draft_length.length_table import LengthTable
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
    # Draft length: a number fixes it, 0 = plain decoding; "2-6" bounds it, "1:6,8:0" sets it by the number of requests
    # in the step; None = that of the LLM, whose upper bounds hold for all requests.
    num_speculative_tokens: int | str | None = None
    prediction: str | Sequence[int] = ()  # expected output, text or token ids, to draft from
    salt: bytes = b""  # only requests with equal salts share prefix pages and past outputs
    is_traced: bool = False  # every delta holds the trees of its steps
    verify: str | Rule | None = None  # verification rule or its name; None = that of the LLM
    skip_special_tokens: bool = True  # leave special tokens out of the text; the end token is never part of it
    shown_tokens: tuple[int, ...] = ()  # special tokens whose names are part of the text nevertheless
    adapter: str | None = None  # name of a LoRA adapter of the LLM; None = the model itself

    def __post_init__(self) -> None:
        _ = self.draft_lengths  # raises for a value of another form
        types = {"priority": int, "salt": bytes, "is_traced": bool, "skip_special_tokens": bool, "shown_tokens": tuple}
        for name, kind in types.items():
            if not isinstance(value := getattr(self, name), kind) or (kind is int and isinstance(value, bool)):
                raise ForedraftError(f"{name} must be of type {kind.__name__}, got {value!r:.80}")
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise ForedraftError(f"adapter is the name of an adapter or None, got {self.adapter!r:.80}")

    @cached_property
    def draft_lengths(self) -> LengthTable | None:
        """Bounds on the draft length by the number of requests in the step; None = the request sets none."""
        return None if self.num_speculative_tokens is None else LengthTable.parse(self.num_speculative_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether the request never drafts."""
        return self.draft_lengths is not None and self.draft_lengths.most == 0
