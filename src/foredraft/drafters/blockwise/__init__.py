"""The method `blockwise`: heads that share one hidden layer."""
