"""Prompts of a training run: token ids, or a source with the decoder's first tokens."""

from collections.abc import Sequence

from foredraft.source import EncoderSource, PreparedPrompt

TrainPrompt = Sequence[int] | PreparedPrompt


def get_ids(prompt: TrainPrompt) -> list[int]:
    """Return the token ids that the decoder reads first."""
    return prompt.tokens if isinstance(prompt, PreparedPrompt) else list(prompt)


def get_source(prompt: TrainPrompt) -> EncoderSource | None:
    """Return the source of an encoder-decoder model's prompt; None for a decoder alone."""
    return prompt.source if isinstance(prompt, PreparedPrompt) else None


def make_prompt(ids: Sequence[int], source: tuple[int, ...] | None) -> TrainPrompt:
    """Make a prompt from the ids that the decoder reads first, and the ids of the source if there is an encoder."""
    return list(ids) if source is None else PreparedPrompt(EncoderSource(source), list(ids))
