"""Rows of images in one forward pass, collected from the requests of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.models.span import Span


@dataclass(frozen=True)
class PassImages:
    """Changes of a pass of T rows by the images of its requests."""

    index: tuple[int, ...]  # [T] row of `states` in place of the embedding; -1 = the embedding of the token
    ahead: tuple[int, ...]  # [T] tokens after its own that a row sees
    states: Tensor  # [n, H]
    layer_states: tuple[Tensor, ...]  # [n, H] by layer, added to the residual stream after it
    positions: Tensor | None  # [A, T] on the CPU, if positions have several axes

    @classmethod
    def collect(cls, spans: Sequence[Span]) -> "PassImages | None":
        """Collect the rows of the spans; None if no image changes the pass."""
        if not any(_changes_pass(span) for span in spans):
            return None
        index: list[int] = []
        ahead: list[int] = []
        states: list[Tensor] = []
        layers: list[tuple[Tensor, ...]] = []
        count = 0
        for span in spans:
            places = [span.start + node for node in span.node_indices]
            if (images := span.images) is None:
                index += [-1] * len(places)
                ahead += [0] * len(places)
                continue
            rows = images.find_rows(min(places), max(places) + 1)
            row_of = {images.indices[row]: count + i for i, row in enumerate(rows)}
            index += [row_of.get(place, -1) for place in places]
            ahead += [span.count_ahead(node) for node in span.node_indices]
            states.append(images.states[rows.start : rows.stop])
            layers.append(tuple(layer[rows.start : rows.stop] for layer in images.layer_states))
            count += len(rows)
        joined = tuple(torch.cat(each) for each in zip(*layers, strict=True))
        return cls(tuple(index), tuple(ahead), torch.cat(states), joined, _collect_positions(spans))

    @property
    def has_blocks(self) -> bool:
        """Whether some row sees a later token."""
        return any(self.ahead)

    def find_rows(self, device: torch.device | str) -> Tensor:
        """Return the packed rows [n] that `states` replace, in its order."""
        places = sorted((row, i) for i, row in enumerate(self.index) if row >= 0)
        return torch.tensor([i for _, i in places], dtype=torch.int64, device=device)


def _changes_pass(span: Span) -> bool:
    """Return whether images change rows of a span: their own, or positions after them."""
    images = span.images
    if images is None:
        return False
    return images.positions is not None or span.start <= images.indices[-1]


def _collect_positions(spans: Sequence[Span]) -> Tensor | None:
    """Return the positions [A, T]; None if those of all requests have one axis."""
    num_axes = next(
        (len(s.images.positions) for s in spans if s.images is not None and s.images.positions is not None), None
    )
    if num_axes is None:
        return None
    parts: list[Tensor] = []
    for span in spans:
        places = [span.start + span.depths[node] for node in span.node_indices]
        if span.images is None or span.images.positions is None:
            parts.append(torch.tensor(places).expand(num_axes, -1))
        else:
            parts.append(span.images.list_positions(places))
    return torch.cat(parts, 1)
