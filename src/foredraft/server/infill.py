"""Fill-in-the-middle prompts: the field `suffix` of a completion request, by the tokens of the model's family.

A model writes the text between a prefix (the prompt) and a suffix. Both are read as ordinary text: only this file
writes control tokens. That a tokenizer has the tokens does not prove that the model was trained with them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.server.errors import ApiError
from foredraft.server.special_token_escape import SpecialTokenEscaper
from foredraft.server.vocabulary import ServerVocabulary

PROBE = "\N{WHITE SMILING FACE}"  # a character before the suffix, with which Code Llama and Mistral encode it too


@dataclass(frozen=True)
class InfillFormat:
    """Format of the prompts of one family of models.

    Attributes:
        prefix: token before the prefix.
        suffix: token before the suffix.
        middle: token before the text to write; "" = none.
        ends: further tokens that end this text, beside the three and the end tokens of the model.
        begins_with_suffix: whether the suffix stands before the prefix.
        adds_space: whether the tokenizer adds a space to a text; it is left out before the suffix.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    begins_with_suffix: bool = False
    adds_space: bool = False


FORMATS = (
    InfillFormat(  # Qwen2.5-Coder, CodeGemma, Granite 4
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    InfillFormat(  # StarCoder, Granite
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>")
    ),
    InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), adds_space=True),  # Code Llama
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder  # noqa: RUF001
    InfillFormat("[PREFIX]", "[SUFFIX]", "", begins_with_suffix=True, adds_space=True),  # Codestral
)  # fmt: skip


@dataclass(frozen=True)
class InfillTokens:
    """Format of a tokenizer with the ids of its tokens.

    Attributes:
        form: the format.
        ids: token id by text, of all tokens of the format that the tokenizer has.
    """

    form: InfillFormat
    ids: dict[str, int]

    @classmethod
    def find(cls, vocabulary: ServerVocabulary) -> "InfillTokens":
        """Return the format whose tokens the tokenizer has.

        Raises:
            ApiError: it has those of no format.
        """
        for form in FORMATS:
            names = [form.prefix, form.suffix, form.middle, *form.ends]
            ids = {name: found for name in names if (found := _find_id(vocabulary, name)) is not None}
            if all(name in ids for name in names[:3] if name):
                return cls(form, ids)
        raise ApiError(
            400,
            "suffix needs fill-in-the-middle tokens such as <|fim_prefix|>, and the tokenizer of this model has none; "
            "leave suffix out, or serve a model that was trained to fill in",
            "suffix",
        )

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end the text to write."""
        return tuple(self.ids.values())

    def encode(self, vocabulary: ServerVocabulary, prompt: str | Sequence[int], suffix: str, begins: bool) -> list[int]:
        """Return the prompt of the model.

        Args:
            vocabulary: tokens of the model.
            prompt: prefix, as text or as token ids. Text that spells a control token is read as ordinary text.
            suffix: text after the text to write.
            begins: add the tokens with which the tokenizer begins a text.

        Raises:
            ApiError: a text that the tokenizer can read only as a control token.
        """
        form, ids = self.form, self.ids
        before = vocabulary.outer_tokens[0] if begins else []
        if isinstance(prompt, str):
            prefix_ids = self._encode_text(vocabulary, prompt, "prompt", continues=False)
        else:
            prefix_ids = list(prompt)
        suffix_ids = self._encode_text(vocabulary, suffix, "suffix", continues=form.adds_space)
        parts = [[ids[form.prefix], *prefix_ids], [ids[form.suffix], *suffix_ids]]
        if form.begins_with_suffix:
            parts.reverse()
        middle = [ids[form.middle]] if form.middle else []
        return [*before, *parts[0], *parts[1], *middle]

    def _encode_text(self, vocabulary: ServerVocabulary, text: str, param: str, continues: bool) -> list[int]:
        """Encode the text of a field without control tokens, without the added space if it continues another text."""
        escaper = SpecialTokenEscaper(vocabulary.special_ids | self.ids, param)
        escaped, tokenizer = escaper.escape(text), vocabulary.require_tokenizer()
        found = _encode_continuation(escaper.encode, escaped, tokenizer) if continues else None
        result = escaper.encode(escaped, tokenizer) if found is None else found
        if not set(self.ids.values()).isdisjoint(result):
            raise ApiError(400, f"{param} holds text that this tokenizer can read only as a control token", param)
        return result


def _encode_continuation(encode: Callable[[str, Any], list[int]], text: str, tokenizer: Any) -> list[int] | None:
    """Encode a text as if it followed another one, without the space that the tokenizer adds; None if it is unclear."""
    before, both = encode(PROBE, tokenizer), encode(PROBE + text, tokenizer)
    return both[len(before) :] if both[: len(before)] == before else None


def _find_id(vocabulary: ServerVocabulary, name: str) -> int | None:
    """Return the id of the token with this text; None if there is none."""
    if vocabulary.tokenizer is None or not name:
        return None
    token = vocabulary.tokenizer.convert_tokens_to_ids(name)
    if not isinstance(token, int) or not 0 <= token < vocabulary.size:
        return None
    return token if vocabulary.tokenizer.convert_ids_to_tokens(token) == name else None
