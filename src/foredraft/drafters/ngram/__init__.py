"""The method `ngram`: drafts copied from earlier in the sequence."""
