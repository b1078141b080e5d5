"""Tokenizer of a GGUF file."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from foredraft.errors import ForedraftError
from foredraft.files.gguf import read_gguf_header


def read_gguf_tokenizer(file: Path, name: str) -> Any | None:
    """Read the tokenizer of a GGUF file by transformers' converter.

    Args:
        file: GGUF file.
        name: name of the model in errors.

    Returns:
        The tokenizer, or None for a file without a vocabulary.

    Raises:
        ForedraftError: transformers has no converter for it.
    """
    if read_gguf_header(file, name).metadata.get("tokenizer.ggml.model", "none") == "none":
        return None
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    except ImportError:
        raise ForedraftError(
            f"this release of transformers cannot read the tokenizer of {name}; give tokenizer=FOLDER, that of the "
            "model that the file was made from"
        ) from None
    architecture, vocabulary, settings = get_gguf_tokenizer(str(file))
    backend, more = convert_gguf_tokenizer(architecture, vocabulary)
    backend = _drop_added_tokens(backend, len(vocabulary["tokens"]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)


def _drop_added_tokens(backend: Tokenizer, size: int) -> Tokenizer:
    """Drop tokens outside the vocabulary, which transformers adds as defaults. The model has no embedding for them."""
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(content))
