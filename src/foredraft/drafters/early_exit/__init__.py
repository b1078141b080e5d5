"""The method `early_exit`: drafts from the first layers of the target."""
