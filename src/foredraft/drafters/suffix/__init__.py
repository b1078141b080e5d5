"""The method `suffix`: drafts from suffix automata of the sequence, earlier outputs and files."""
