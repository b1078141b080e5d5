"""Two vocabularies side by side: which tokens are the same, and how much of a text they make up."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from foredraft.drafters.vocabularies import Vocabulary

SAMPLE = '''The river rose in the night, and by morning the bridge was gone; nobody in the village had heard it fall.
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
class Pair:
    """A target's vocabulary and its draft's."""

    target: Vocabulary
    draft: Vocabulary

    @cached_property
    def controls(self) -> dict[int, int | bytes | None]:
        """What a control token of the target is in the draft: a token, its name as text, or nothing.

        The end and the beginning of a text are what they are by their role, others by their name.
        """
        target, draft = self.target, self.draft
        found: dict[int, int | bytes | None] = {}
        for name, token in target.controls.items():
            own = draft.controls.get(name)
            text = None if token in target.silent else name.encode()
            found[token] = text if own is None else own
        if target.bos is not None:
            found[target.bos] = draft.bos
        if target.eos is not None:  # after the beginning: many models have one token for both
            found[target.eos] = draft.eos
        return found

    @cached_property
    def back(self) -> dict[int, int]:
        """What a control token of the draft is in the target, where it is one."""
        found = {own: token for token, own in self.controls.items() if isinstance(own, int)}
        if self.target.eos is not None and self.draft.eos is not None:
            found[self.draft.eos] = self.target.eos
        return found

    @cached_property
    def shared(self) -> dict[int, int]:
        """Token of the target -> the token of the draft that is the same, rising; one to one.

        The same are two that stand for the same bytes and are each the one its vocabulary has for them, two ends of a
        text, and two control tokens of one name.
        """
        target, draft = self.target, self.draft
        found = {token: draft.ids[piece] for piece, token in target.ids.items() if piece in draft.ids}
        found |= {token: own for own, token in self.back.items()}
        return dict(sorted(found.items()))

    @cached_property
    def coverage(self) -> float:
        """Share of the tokens of a text in the target's vocabulary that the draft has too."""
        ids = self.target.encode(SAMPLE)
        return sum(token in self.shared for token in ids) / max(len(ids), 1)

    def is_readable(self) -> bool:
        """Whether each can spell what the other says, up to a few odd characters."""
        data = SAMPLE.encode()
        return all(_misses(side.continued(b"", data)) * 5 <= len(data) for side in (self.target, self.draft))


def _misses(ids: Sequence[int]) -> int:
    return sum(token < 0 for token in ids)
