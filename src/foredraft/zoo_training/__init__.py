"""Training of the built-in models, with `foredraft.train`: `foredraft zoo train` runs it."""
