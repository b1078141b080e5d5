"""Draft loop on a device: all levels of all drafts in one recorded pass."""
