"""Map between the vocabularies of target and draft model: shared tokens, and their share of a sample text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from foredraft.tokenization.byte_vocabulary import ByteVocabulary

SAMPLE_TEXT = '''The river rose in the night, and by morning the bridge was gone; the village had not heard it fall.
"What shall we do?" she asked. 1,234 people live here (27.5 % of them since 2019), most of them near the mill.

def total(items: list[dict[str, float]], key: str = "price") -> float:
    """Return the sum of one field over all items that have it."""
    return sum(item[key] for item in items if key in item)

- First, read the file.
- Then remove what is not needed: `rm -rf build/`, and see https://example.org/docs?page=2#install

{"name": "sensor-7", "values": [0.25, 1e-3, null], "is_active": true}
Die Straße führt über die Brücke. Le café était déjà fermé. Где находится вокзал? 今天天气很好。
'''


@dataclass(frozen=True)
class VocabMap:
    """Vocabularies of a target and its draft model."""

    target: ByteVocabulary
    draft: ByteVocabulary

    @cached_property
    def draft_controls(self) -> dict[int, int | bytes | None]:
        """Draft side of every target control token: a token, the bytes of its name, or None for nothing.

        The beginning and the end of a sequence are matched by role, other control tokens by name.
        """
        target, draft = self.target, self.draft
        mapping: dict[int, int | bytes | None] = {}
        for name, token in target.control_tokens.items():
            draft_token = draft.control_tokens.get(name)
            text = None if token in target.empty_controls else name.encode()
            mapping[token] = text if draft_token is None else draft_token
        if target.bos is not None:
            mapping[target.bos] = draft.bos
        if target.eos is not None:  # after bos: many models have one token for both
            mapping[target.eos] = draft.eos
        return mapping

    @cached_property
    def target_controls(self) -> dict[int, int]:
        """Target control token by draft control token, if there is one."""
        mapping = {
            draft_token: token for token, draft_token in self.draft_controls.items() if isinstance(draft_token, int)
        }
        if self.target.eos is not None and self.draft.eos is not None:
            mapping[self.draft.eos] = self.target.eos
        return mapping

    @cached_property
    def shared_tokens(self) -> dict[int, int]:
        """Draft token by target token for equal tokens, in rising order; one to one.

        Tokens are equal if each is its vocabulary's token for the same bytes. The two end tokens are equal, and so are
        control tokens of one name.
        """
        target, draft = self.target, self.draft
        mapping = {
            token: draft.token_by_bytes[token_bytes]
            for token_bytes, token in target.token_by_bytes.items()
            if token_bytes in draft.token_by_bytes
        }
        mapping |= {token: draft_token for draft_token, token in self.target_controls.items()}
        return dict(sorted(mapping.items()))

    @cached_property
    def coverage(self) -> float:
        """Share of the sample text's target tokens that the draft model has too."""
        ids = self.target.encode(SAMPLE_TEXT)
        return sum(token in self.shared_tokens for token in ids) / max(len(ids), 1)

    def is_readable(self) -> bool:
        """Return whether each vocabulary can encode the sample text, except for at most 1/5 of its bytes."""
        data = SAMPLE_TEXT.encode()
        return all(
            _count_unknown(vocabulary.encode_continuation(b"", data)) * 5 <= len(data)
            for vocabulary in (self.target, self.draft)
        )


def _count_unknown(ids: Sequence[int]) -> int:
    return sum(token < 0 for token in ids)
