"""Position of an llguidance matcher in one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.sampling.grammar_tokens import GrammarTokens

# Limits for one sequence. With llguidance's defaults (a{1000}){1000} takes 1.5 s and 180 MiB before it fails, and one
# sequence up to 500 MiB of states. With these a mask that fails takes at most 0.2 s. Schemas with 2,000 properties,
# 1,000 patterns or 500 alternatives stay within them.
PARSER_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 1 << 16,  # 1 to 2 kB each; a counted string needs one per character
}
# Error for a sequence of allowed tokens that llguidance cannot follow.
LIMITS_EXCEEDED = "the text has grown past the limits of llguidance's parser"


@dataclass
class GrammarCursor:
    """An llguidance matcher, which moves along the output of one request and the draft paths after it."""

    initial_matcher: Any  # LLMatcher before the first token; never moved
    tokens: GrammarTokens
    # LLMatcher after `_num_output` tokens of the output and then `path`; None = at the start, or after an error.
    _matcher: Any = field(default=None, init=False)
    _num_output: int = field(default=0, init=False)
    path: list[int] = field(default_factory=list, init=False)  # tokens consumed after the output

    def needs_restart(self, output: Sequence[int]) -> bool:
        """Whether the output can be reached only from the start."""
        return self._matcher is None or len(output) < self._num_output

    def move_to_output(self, output: Sequence[int]) -> bool:
        """Move to the end of the output, with or without a path after it; return false if that is impossible."""
        if self.needs_restart(output):
            self._matcher, self._num_output, self.path = self.initial_matcher.deep_copy(), 0, []
        if len(output) > self._num_output:
            if not self.move_to_path(output[self._num_output :]):
                return False
            self._num_output, self.path = len(output), []
        return True

    def move_to_path(self, tokens: Sequence[int]) -> bool:
        """Move to the end of a path after the output; return false if the grammar does not allow it."""
        same = 0
        for old, new in zip(self.path, tokens, strict=False):
            if old != new:
                break
            same += 1
        if same < len(self.path):
            self._matcher.rollback(len(self.path) - same)
            del self.path[same:]
        new_tokens = list(tokens[same:])
        if not self.tokens.can_read(new_tokens):
            return False
        num_consumed = self._matcher.try_consume_tokens(new_tokens) if new_tokens else 0
        self.path += new_tokens[:num_consumed]
        return bool(num_consumed == len(new_tokens))

    def compute_bits(self) -> Tensor | None:
        """Compute llguidance's mask [n] bool by token id, n > `parser_end_id`; None after an error."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return None
        return torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool))

    @property
    def has_error(self) -> bool:
        """Whether llguidance has reported an error since the last `discard`."""
        return bool(self._matcher.is_error())

    def describe_error(self) -> str:
        """Return why llguidance could not follow the tokens."""
        return _format_error(self._matcher.get_error()) if self._matcher.is_error() else LIMITS_EXCEEDED

    def discard(self) -> None:
        """Discard the matcher, which cannot leave an error state; the next move begins at the start."""
        self._matcher = None


def _format_error(message: str) -> str:
    """Return the first line of llguidance's message, with the limit if the message leaves it out."""
    line = message.strip().split("\n")[0] or "unknown error of llguidance"
    lacks_limit = line.endswith("too many expressions constructed")
    return f"{line} (limit {PARSER_LIMITS['initial_lexer_fuel']:,})" if lacks_limit else line
