"""Images in a prompt, as the rows of a decoder's input that stand for them."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise

import torch
from torch import Tensor

from foredraft.errors import ForedraftError

DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)  # compared by identity
class EncodedImage:
    """Output of an image encoder for one image: the token ids that stand for it, and what the decoder reads there."""

    tokens: tuple[int, ...]  # L token ids, those around the rows included
    indices: tuple[int, ...]  # [n] indices of the rows among the tokens, rising
    states: Tensor = field(repr=False)  # [n, H] in place of the embeddings
    # Runs of tokens (start, stop) that see each other, later ones included.
    blocks: tuple[tuple[int, int], ...] = ()
    # [n, H] by layer, added to the residual stream after it.
    layer_states: tuple[Tensor, ...] = field(default=(), repr=False)
    positions: Tensor | None = field(default=None, repr=False)  # [A, L] from 0 on, for several axes; None = one axis
    has_local_blocks: bool = False  # only layers with a sliding window have the blocks


@dataclass(frozen=True, eq=False)  # compared by identity; the n samples of a prompt share it
class PlacedImages:
    """Images of one prompt at their places. Its KV depends on them beside the token ids."""

    indices: tuple[int, ...]  # [n] indices of the rows in the prompt, rising
    states: Tensor = field(repr=False)  # [n, H] in place of the embeddings
    blocks: tuple[tuple[int, int], ...] = ()  # rising runs of tokens (start, stop) that see each other
    layer_states: tuple[Tensor, ...] = field(default=(), repr=False)  # [n, H] by layer, added after it
    positions: Tensor | None = field(default=None, repr=False)  # [A, P] of the prompt; None = the indices of its tokens
    has_local_blocks: bool = False  # as of `EncodedImage`, for all images

    @classmethod
    def place(cls, num_tokens: int, images: Sequence[tuple[int, EncodedImage]]) -> "PlacedImages":
        """Place the images of a prompt.

        Args:
            num_tokens: P, tokens of the prompt.
            images: index of the first token of every image and the image, in order; at least one.
        """
        indices = tuple(start + index for start, image in images for index in image.indices)
        blocks = tuple((start + a, start + b) for start, image in images for a, b in image.blocks)
        layers = zip(*(image.layer_states for _, image in images), strict=True)
        return cls(
            indices,
            torch.cat([image.states for _, image in images]),
            blocks,
            tuple(torch.cat(layer) for layer in layers),
            _place_positions(num_tokens, images),
            images[0][1].has_local_blocks,
        )

    @property
    def shift(self) -> int:
        """Number that a token after the prompt adds to its index for its position."""
        return 0 if self.positions is None else int(self.positions[:, -1].max()) + 1 - self.positions.shape[1]

    def find_rows(self, start: int, stop: int) -> range:
        """Return the rows of `states` for the tokens [start, stop) of the prompt."""
        return range(bisect_left(self.indices, start), bisect_left(self.indices, stop))

    def count_ahead(self, index: int) -> int:
        """Return how many tokens after its own a token of the prompt sees."""
        return max(self._find_block_end(index) - index - 1, 0)

    def fit_chunk(self, start: int, size: int) -> int:
        """Change the size of a chunk of tokens that begins at `start`, so that it ends in no block.

        A chunk that would begin and end in a block becomes as long as the block's rest, and may grow by that.
        """
        end = start + size
        block = next(((a, b) for a, b in self.blocks if a < end < b), None)
        if block is None:
            return size
        return block[0] - start if block[0] > start else block[1] - start

    @cached_property
    def longest_block(self) -> int:
        """Tokens of the longest block, which are computed in one pass; 0 without blocks."""
        return max((b - a for a, b in self.blocks), default=0)

    def digest_tokens(self, start: int, stop: int) -> bytes:
        """Digest what the KV of the tokens [start, stop) depends on beside ids and earlier tokens.

        Tokens of a block depend on all of it. Empty if no image and no shifted position is among them.
        """
        hasher = blake2b(digest_size=DIGEST_BYTES)
        rows = self.find_rows(start, max(stop, self._find_block_end(stop - 1)))
        hasher.update(repr([index - start for index in self.indices[rows.start : rows.stop]]).encode())
        for states in (self.states, *self.layer_states):
            hasher.update(states[rows.start : rows.stop].detach().cpu().float().contiguous().numpy().tobytes())
        if self.positions is not None:
            hasher.update(_list_positions(self.positions, self.shift, start, stop).numpy().tobytes())
        elif not rows:
            return b""
        return hasher.digest()

    def list_positions(self, indices: Sequence[int]) -> Tensor:
        """Return the positions [A, T] of tokens, those after the prompt included."""
        assert self.positions is not None, "the positions of this model have one axis"
        places = torch.tensor(indices)
        length = self.positions.shape[1]
        inside = self.positions[:, places.clamp_max(length - 1)]
        return torch.where(places < length, inside, places + self.shift)

    def _find_block_end(self, index: int) -> int:
        return next((b for a, b in self.blocks if a <= index < b), 0)


def _list_positions(positions: Tensor, shift: int, start: int, stop: int) -> Tensor:
    length = positions.shape[1]
    later = torch.arange(max(start, length), max(stop, length)) + shift
    return torch.cat([positions[:, start:stop], later.expand(len(positions), -1)], 1).contiguous()


def _place_positions(num_tokens: int, images: Sequence[tuple[int, EncodedImage]]) -> Tensor | None:
    """Count the positions [A, P] of a prompt: a token or image begins after the largest position before it."""
    first = images[0][1].positions
    if first is None:
        return None
    parts: list[Tensor] = []
    index, place = 0, 0
    for start, image in images:
        assert image.positions is not None, "one image has positions and another has none"
        parts += [torch.arange(place, place + start - index).expand(len(first), -1)]
        place += start - index
        parts += [image.positions + place]
        place += int(image.positions.max()) + 1
        index = start + len(image.tokens)
    parts += [torch.arange(place, place + num_tokens - index).expand(len(first), -1)]
    return torch.cat(parts, 1)


def expand_placeholders(
    tokens: Sequence[int], placeholder: int, images: Sequence[EncodedImage]
) -> tuple[list[int], list[int]]:
    """Replace the placeholders of a prompt by the tokens of its images.

    Args:
        tokens: token ids, with one placeholder per image.
        placeholder: id of the placeholder.
        images: images in their order.

    Returns:
        The token ids, and the index of the first token of every image.

    Raises:
        ForedraftError: there are more or fewer placeholders than images.
    """
    places = [i for i, token in enumerate(tokens) if token == placeholder]
    if len(places) != len(images):
        raise ForedraftError(f"the prompt has {len(places)} image placeholders and {len(images)} images")
    expanded: list[int] = []
    starts: list[int] = []
    bounds = [-1, *places, len(tokens)]
    for i, (before, after) in enumerate(pairwise(bounds)):
        expanded += tokens[before + 1 : after]
        if i < len(images):
            starts.append(len(expanded))
            expanded += images[i].tokens
    return expanded, starts
