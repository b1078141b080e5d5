"""The method `draft_model`: drafts from a smaller language model."""
