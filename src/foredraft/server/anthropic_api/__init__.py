"""Routes of Anthropic's API of messages: their fields, blocks, events and errors."""
