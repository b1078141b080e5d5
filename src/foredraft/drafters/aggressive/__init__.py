"""The method `aggressive`: drafts copied from a source text, and from predicted outputs."""
