"""The method `token_recycling`: the target's own earlier candidate tokens, looked up by token."""
