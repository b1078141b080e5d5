"""Creation of a method's drafter from the options of a user."""

from typing import Any

from foredraft.drafters.common.target_access import load_checkpoint
from foredraft.drafters.interface import Drafter
from foredraft.drafters.method import DrafterContext, Method


def create_drafter(method: Method, config: Any, context: DrafterContext) -> Drafter:
    """Make a drafter. A method without `create` drafts with the head that the user named, or with the built-in one.

    Args:
        method: the method.
        config: options, an instance of `method.config`.
        context: target, user options and environment.

    Raises:
        ForedraftError: for invalid options, without a head, or for a head that does not fit the target.
    """
    if method.create is not None:
        return method.create(config, context)
    assert method.from_checkpoint is not None, "a Method has one of the two"
    if method.check_options is not None:
        method.check_options(config, context.num_speculative_tokens)
    return method.from_checkpoint(config, load_checkpoint(context, method), context)
