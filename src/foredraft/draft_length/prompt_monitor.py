"""Steps soon after a prompt, whose times are not typical.

Passes over a prompt replace the weights that caches hold, so the next few passes of a small target take up to a half
longer, with drafts and without. If they came into the times that plain decoding and drafts are compared by, their share
in either would decide.
"""

NUM_DISTURBED = 8  # steps after a prompt whose times are not typical
# Steps since the prompt before from which one is rare. Where prompts come more often, the steps after them are typical.
MIN_DISTANCE = 2 * NUM_DISTURBED


class PromptMonitor:
    """Steps since the last pass with a prompt."""

    def __init__(self) -> None:
        self._num_steps = 0  # since the last prompt; the first steps of an engine have to count, so none is disturbed
        self._num_disturbed = 0  # steps after that prompt whose times are not typical

    @property
    def is_disturbed(self) -> bool:
        """Whether the next step is soon after a rare prompt."""
        return self._num_steps < self._num_disturbed

    def record(self, has_prompt: bool) -> None:
        """Count a finished step."""
        if has_prompt:
            self._num_disturbed = NUM_DISTURBED if self._num_steps >= MIN_DISTANCE else 0
            self._num_steps = 0
        else:
            self._num_steps += 1
