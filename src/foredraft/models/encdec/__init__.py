"""Encoder-decoder models: T5, BART, Whisper and their families."""
