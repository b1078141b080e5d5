"""Conversion of one record to a document of an encoder-decoder model: a source, and the output of the decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foredraft.errors import ForedraftError
from foredraft.models.encdec.model import EncoderDecoder
from foredraft.models.hf import HFModel
from foredraft.models.prompts import find_forced_ids, find_start_ids
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
    prefix: tuple[int, ...]  # the decoder's first tokens, which are not learnt
    max_source: int  # tokens of the longest source

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
        return cls(target.name, tokenizer, prefix, target.source_length)

    def parse_document(self, record: Mapping[str, Any], location: str) -> Document:
        """Convert a record to a document.

        Args:
            record: SEQ2SEQ_FORMATS, or a line that `AnswerWriter` has written.
            location: File and line, for messages.

        Raises:
            ForedraftError: if the record has another format, or its source is too long.
        """
        if isinstance(record.get("source_ids"), list):
            ids, count = np.array(record["ids"], dtype=np.int64), int(record["prompt_tokens"])
            return Document(ids, np.arange(len(ids)) >= count, tuple(map(int, record["source_ids"])))
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
                f"{location} has the keys {', '.join(map(str, record)) or 'none'}; {self.name} is an encoder-decoder "
                f"model, and a record is {SEQ2SEQ_FORMATS}"
            )
        if self.tokenizer is None:
            raise ForedraftError(f"{self.name} has no tokenizer, so {location} cannot be read")
        ids = tuple(encode(self.tokenizer, content, True).input_ids)
        if len(ids) > self.max_source:
            raise ForedraftError(
                f"{location}: the source has {len(ids)} tokens and the encoder of {self.name} takes {self.max_source}; "
                "shorten it or leave the record out"
            )
        return ids

    def _encode_text(self, text: str) -> list[int]:
        """Encode the decoder's output. Some tokenizers begin it with the forced tokens, which the prefix has."""
        ids = list(self.tokenizer(text_target=text).input_ids)
        forced = list(self.prefix[1:])
        ids = ids[len(forced) :] if forced and ids[: len(forced)] == forced else ids
        end = self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]


def write_record(prompt: TrainPrompt, answer: Sequence[int]) -> dict[str, Any]:
    """Return the line that stores the answer to a prompt, in token ids; `parse_document` reads it."""
    ids, source = get_ids(prompt), get_source(prompt)
    record: dict[str, Any] = {"ids": [*ids, *answer], "prompt_tokens": len(ids)}
    return record if source is None else record | {"source_ids": list(source.tokens)}
