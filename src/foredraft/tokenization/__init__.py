"""Tokenizers: the bytes of tokens, vocabularies in bytes, encoding and incremental detokenization."""
