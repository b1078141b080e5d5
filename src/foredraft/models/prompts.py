"""Conversion of prompts to token ids, and for encoder-decoder models to a source and the decoder's first tokens."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from foredraft.errors import ForedraftError
from foredraft.image_prompt import EncodedImagePrompt, ImagePrompt
from foredraft.models.encdec.model import EncoderDecoder
from foredraft.models.hf import HFModel
from foredraft.placed_images import PlacedImages
from foredraft.source import EncoderSource, PreparedPrompt, Seq2Seq
from foredraft.tokenization.encoding import encode

EMPTY_PROMPT_ERROR = "the prompt is empty; give at least one token of text"
MESSAGES_ERROR = "the prompt is made of messages, and no chat template is applied here; give them to LLM.chat"
Prompt = str | Sequence[int] | Seq2Seq | PreparedPrompt | ImagePrompt | EncodedImagePrompt
ONE_PROMPT = (str, Seq2Seq, PreparedPrompt, ImagePrompt, EncodedImagePrompt)  # of these, no sequence is several prompts


class PromptInput(NamedTuple):
    """Input of a model, made of a prompt."""

    tokens: list[int]  # of the decoder
    source: EncoderSource | None = None  # of an encoder-decoder model
    images: PlacedImages | None = None  # of a vision-language model


def read_prompt(model: HFModel, tokenizer: Any | None, prompt: Prompt) -> PromptInput:
    """Convert a prompt to the input of a model.

    Args:
        model: target.
        tokenizer: tokenizer of the target; None = prompts must be token ids.
        prompt: text, token ids, or a prompt with a source or with images.

    Raises:
        ForedraftError: the prompt is empty, too long, or of a kind that the model does not support.
    """
    if isinstance(model, EncoderDecoder):
        if isinstance(prompt, ImagePrompt | EncodedImagePrompt):
            raise ForedraftError(f"{model.name} reads no images; leave them out, or use a vision-language model")
        source, ids = _read_seq2seq_prompt(model, tokenizer, prompt)
        return PromptInput(ids, source)
    if isinstance(prompt, Seq2Seq | PreparedPrompt):
        raise ForedraftError(f"{model.name} has no encoder: give the prompt as text or a list of token ids")
    images = None
    if isinstance(prompt, EncodedImagePrompt):
        ids, images = list(prompt.tokens), prompt.images
    elif isinstance(prompt, ImagePrompt) and len(prompt.images):
        encoder = model.require_image_encoder(model.name)
        ids, images = encoder.place(_encode_ids(model, tokenizer, prompt.text), encoder.read(prompt.images))
    else:
        ids = _encode_ids(model, tokenizer, prompt.text if isinstance(prompt, ImagePrompt) else prompt)
    if not ids:
        raise ForedraftError(EMPTY_PROMPT_ERROR)
    if len(ids) >= model.context_length:
        raise ForedraftError(
            f"the prompt has {len(ids)} tokens and the model's context is {model.context_length}; shorten it"
        )
    return PromptInput(ids, images=images)


def _read_seq2seq_prompt(
    model: EncoderDecoder, tokenizer: Any | None, prompt: str | Sequence[int] | Seq2Seq | PreparedPrompt
) -> tuple[EncoderSource, list[int]]:
    """Return the source and the decoder's first tokens. A prompt of text or token ids is the source."""
    if isinstance(prompt, PreparedPrompt):
        return prompt.source, prompt.tokens
    parts = prompt if isinstance(prompt, Seq2Seq) else Seq2Seq(prompt)
    source = _read_source(model, tokenizer, parts)
    prefix = (
        find_forced_ids(model)
        if parts.prefix is None
        else _encode_ids(model, tokenizer, parts.prefix, add_special_tokens=False)
    )
    ids = find_start_ids(model) + prefix
    if len(ids) >= model.context_length:
        raise ForedraftError(
            f"the decoder's prefix has {len(ids)} tokens, the model's context is {model.context_length}; shorten it"
        )
    return source, ids


def _read_source(model: EncoderDecoder, tokenizer: Any | None, prompt: Seq2Seq) -> EncoderSource:
    if prompt.features is not None:
        if len(prompt.source):
            raise ForedraftError("a prompt has a source or features, not both")
        source = EncoderSource(features=torch.as_tensor(prompt.features))
        model.encoder.check_source(source, model.name)
        return source
    if model.encoder.takes_features:
        model.encoder.check_source(EncoderSource(), model.name)
    ids = _encode_ids(model, tokenizer, prompt.source)
    if not ids:
        raise ForedraftError(EMPTY_PROMPT_ERROR)
    if len(ids) > model.source_length:
        raise ForedraftError(
            f"the prompt has {len(ids)} tokens and the model's encoder takes {model.source_length}; shorten it"
        )
    return EncoderSource(tokens=tuple(ids))


def _encode_ids(
    model: HFModel, tokenizer: Any | None, text: str | Sequence[int], add_special_tokens: bool = True
) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise ForedraftError(f"{model.name} has no tokenizer: give the prompt as a list of token ids")
        ids = list(encode(tokenizer, text, add_special_tokens).input_ids)
    else:
        ids = _read_ids(text)
    size = model.vocab_size
    if not all(0 <= token < size for token in ids):
        raise ForedraftError(f"a prompt token id is outside the vocabulary of {size} tokens")
    return ids


def _read_ids(tokens: Sequence[Any]) -> list[int]:
    try:
        return [int(token) for token in tokens]
    except (TypeError, ValueError) as error:
        has_messages = isinstance(tokens, Sequence) and any(isinstance(token, Mapping) for token in tokens)
        if has_messages or isinstance(tokens, Mapping):
            raise ForedraftError(MESSAGES_ERROR) from None
        raise ForedraftError(f"a prompt is text or a list of token ids ({error})") from None


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Convert one prompt or several to a list. A list of integers is one prompt of token ids.

    Args:
        prompts: one prompt, or a sequence of prompts.

    Raises:
        ForedraftError: there is no prompt.
    """
    if isinstance(prompts, ONE_PROMPT) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    if not len(prompts):
        raise ForedraftError(EMPTY_PROMPT_ERROR)
    return list(prompts)  # type: ignore[arg-type]


def encode_bad_words(
    model: HFModel, tokenizer: Any | None, words: Sequence[str | tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Convert bad words to token ids. A string is forbidden with and without a space before it.

    Args:
        model: target.
        tokenizer: tokenizer of the target; None = words must be token ids.
        words: strings or token ids.

    Raises:
        ForedraftError: there is a string and no tokenizer.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            sequences.append(word)
            continue
        if tokenizer is None:
            raise ForedraftError(f"{model.name} has no tokenizer: give bad_words as token ids")
        for spelling in (word, " " + word.lstrip()):
            sequences.append(tuple(encode(tokenizer, spelling, add_special_tokens=False).input_ids))
    return tuple(dict.fromkeys(sequences))


def encode_prediction(model: HFModel, tokenizer: Any | None, prediction: str | Sequence[int]) -> tuple[int, ...]:
    """Convert the expected output of a request to token ids.

    Args:
        model: target.
        tokenizer: tokenizer of the target; None = the prediction must be token ids.
        prediction: text or token ids.

    Raises:
        ForedraftError: it is text and there is no tokenizer, or it is neither text nor token ids of the vocabulary.
    """
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ForedraftError(f"{model.name} has no tokenizer: give the prediction as token ids")
        return tuple(encode(tokenizer, prediction, add_special_tokens=False).input_ids) if prediction else ()
    try:
        if isinstance(prediction, bytes | bytearray):  # its items are integers, but no token ids
            raise TypeError
        return tuple(operator.index(token) for token in prediction)
    except TypeError:
        raise ForedraftError(f"prediction must be text or token ids, got {prediction!r:.80}") from None


def find_end_ids(model: HFModel, tokenizer: Any | None) -> frozenset[int]:
    """Collect the token ids that end a sequence from the model's configurations and the tokenizer."""
    entries: list[Any] = [
        getattr(model.model.generation_config, "eos_token_id", None),
        getattr(model.model.config.get_text_config(), "eos_token_id", None),  # CPM-Ant's configuration has none
    ]
    if tokenizer is not None:
        entries.append(tokenizer.eos_token_id)
    ids: set[int] = set()
    for entry in entries:
        ids |= set(entry) if isinstance(entry, (list, tuple)) else {entry} if entry is not None else set()
    return frozenset(ids)


def count_prompt_tokens(model: HFModel, count: int) -> int:
    """Return the number of decoder tokens before the completion, for a prompt of `count` tokens."""
    return len(find_start_ids(model) + find_forced_ids(model)) if isinstance(model, EncoderDecoder) else count


def find_start_ids(model: EncoderDecoder) -> list[int]:
    """Find the start token ids of the decoder.

    Raises:
        ForedraftError: the model's configuration has none.
    """
    start = _read_setting(model, "decoder_start_token_id")
    start = _read_setting(model, "bos_token_id") if start is None else start
    if start is None:
        raise ForedraftError(f"{model.name}: its configuration has no decoder_start_token_id; set it there")
    return [int(start)] if not isinstance(start, (list, tuple)) else [int(start[0])]


def find_forced_ids(model: EncoderDecoder) -> list[int]:
    """Find the token ids after the start token that the model's generation_config forces."""
    first = _read_setting(model, "forced_bos_token_id")
    if first is not None:
        return [int(first)]
    forced: list[int] = []
    for position, token in sorted(_read_setting(model, "forced_decoder_ids") or ()):
        if position != len(forced) + 1 or token is None:
            break
        forced.append(int(token))
    return forced


def _read_setting(model: EncoderDecoder, name: str) -> Any:
    """Read a setting of generation_config, or of the model's configuration if it is not set there."""
    value = getattr(model.model.generation_config, name, None)
    return getattr(model.model.config, name, None) if value is None else value
