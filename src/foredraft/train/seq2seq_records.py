"""Conversion of one record to a document of an encoder-decoder model: a source, and the output of the decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foredraft.errors import ForedraftError
from foredraft.models.encdec.model import EncoderDecoder
from foredraft.models.hf import HFModel
from foredraft.models.prompts import find_end_ids, find_forced_ids, find_start_ids
from foredraft.tokenization.encoding import encode
from foredraft.train.documents import Document
from foredraft.train.prompts import TrainPrompt, get_ids, get_source, make_prompt

SEQ2SEQ_FORMATS = '{"source": .., "text": ..}'


@dataclass(frozen=True)
class Seq2SeqEncoding:
    """Encoding of sources and texts for one encoder-decoder model.

    The ids of a document are those that the decoder reads when it serves a request: its start token, the forced tokens,
    the text and the end token.
    """

    name: str  # of the model, for messages
    tokenizer: Any  # None = records must hold token ids
    prefix: tuple[int, ...]  # the decoder's first tokens, which are not learnt: its start token and the forced tokens
    end_ids: frozenset[int]  # tokens that end an output
    max_source: int  # tokens of the longest source
    vocab_size: int

    @classmethod
    def from_model(cls, target: HFModel, tokenizer: Any) -> "Seq2SeqEncoding | None":
        """Make the encoding of a model; None for a decoder alone.

        Raises:
            ForedraftError: if the encoder reads sound or images.
        """
        if not isinstance(target, EncoderDecoder):
            return None
        if target.encoder.takes_features:
            raise ForedraftError(f"{target.name} reads audio; drafters are trained only for encoders that read text")
        prefix = (*find_start_ids(target), *find_forced_ids(target))
        end_ids = find_end_ids(target, tokenizer)
        return cls(target.name, tokenizer, prefix, end_ids, target.source_length, target.vocab_size)

    def parse_document(self, record: Mapping[str, Any], location: str) -> Document:
        """Convert a record to a document.

        Args:
            record: SEQ2SEQ_FORMATS, or a line that `AnswerWriter` has written.
            location: File and line, for messages.

        Raises:
            ForedraftError: if the record has another format, or its source is too long.
        """
        if "source_ids" in record:
            return self._read_answer(record, location)
        source = self._encode_source(record, location)
        text = record.get("text", "")
        if not isinstance(text, str):
            raise ForedraftError(f"{location}: the text is not a string")
        ids = np.array([*self.prefix, *(self._encode_text(text) if text else ())], dtype=np.int64)
        return Document(ids, np.arange(len(ids)) >= len(self.prefix), source)

    def parse_prompt(self, record: Mapping[str, Any], location: str) -> TrainPrompt:
        """Return the prompt of a record: its source, and the decoder's first tokens."""
        return make_prompt(self.prefix, self._encode_source(record, location))

    def _encode_source(self, record: Mapping[str, Any], location: str) -> tuple[int, ...]:
        content = record.get("source")
        if not isinstance(content, str) or not content:
            raise ForedraftError(
                f"{location} has no source (its keys: {', '.join(map(str, record)) or 'none'}), and {self.name} is an "
                f"encoder-decoder model; give JSON Lines with {SEQ2SEQ_FORMATS}"
            )
        if self.tokenizer is None:
            raise ForedraftError(f"{self.name} has no tokenizer, so {location} cannot be read; add its tokenizer")
        return self._check_source(encode(self.tokenizer, content, True).input_ids, location)

    def _check_source(self, ids: Sequence[int], location: str) -> tuple[int, ...]:
        if len(ids) > self.max_source:
            raise ForedraftError(
                f"{location}: the source has {len(ids)} tokens and the encoder of {self.name} takes {self.max_source}; "
                "shorten it or leave the record out"
            )
        if not all(0 <= token < self.vocab_size for token in ids):
            raise ForedraftError(
                f"{location}: a token of the source is outside the vocabulary of {self.vocab_size} tokens of "
                f"{self.name}; the ids are of another tokenizer"
            )
        return tuple(ids)

    def _read_answer(self, record: Mapping[str, Any], location: str) -> Document:
        """Read a line that `write_record` has made."""
        try:
            ids, count = np.array([int(token) for token in record["ids"]], dtype=np.int64), int(record["prompt_tokens"])
            source = [int(token) for token in record["source_ids"]]
        except (KeyError, TypeError, ValueError):
            raise ForedraftError(
                f"{location} has source_ids without lists of token ids as ids and source_ids, and a number as "
                f"prompt_tokens; give {SEQ2SEQ_FORMATS}"
            ) from None
        if not source or not 1 <= count <= len(ids):
            raise ForedraftError(f"{location} has no source or no tokens that the decoder begins with; remove the line")
        return Document(ids, np.arange(len(ids)) >= count, self._check_source(source, location))

    def _encode_text(self, text: str) -> list[int]:
        """Encode the decoder's output up to the end token, whatever its tokenizer puts around a text."""
        has_forced = len(self.prefix) > 1  # then they stand in place of the tokenizer's own first tokens
        ids = list(encode(self.tokenizer, text, not has_forced, is_target=True).input_ids)
        end = next((i for i, token in enumerate(ids) if token in self.end_ids), None)
        if end is not None:
            return ids[: end + 1]  # mBART's language follows it
        last = self.tokenizer.eos_token_id
        return [*ids, *(sorted(self.end_ids)[:1] if last is None else [last])]


def write_record(prompt: TrainPrompt, answer: Sequence[int]) -> dict[str, Any]:
    """Return the line that stores the answer to a prompt, in token ids; `parse_document` reads it."""
    ids, source = get_ids(prompt), get_source(prompt)
    record: dict[str, Any] = {"ids": [*ids, *answer], "prompt_tokens": len(ids)}
    return record if source is None else record | {"source_ids": list(source.tokens)}
