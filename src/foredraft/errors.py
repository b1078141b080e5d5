"""Errors meant for the user: one line that says what to do."""


class ForedraftError(ValueError):
    """Bad input, an unsupported model, an impossible combination. The message is the whole story."""
