"""The method `ngram_lm`: drafts from a table of n-gram counts."""
