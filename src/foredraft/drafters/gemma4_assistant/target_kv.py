"""Keys and values of a target's layers, which an assistant reads and never writes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.drafters.gemma4_assistant.shape import FULL_ATTENTION, AssistantShape
from foredraft.errors import ForedraftError
from foredraft.kv.int8_rows import SCALE_BYTES
from foredraft.kv.pool import KVPool
from foredraft.models.attention import PageAttention, attend_pages
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel
from foredraft.request import Request

PROBE_PAGE_SIZE = 16


@dataclass(frozen=True)
class FrozenRows:
    """Rows of a pass over drafts. The rows of one request see the same keys: all before its last committed token.

    `batch` describes every row as one more row of the token before the last one, whose keys and values are written.
    """

    batch: ForwardBatch
    positions: Tensor  # [R] of the last committed tokens

    @classmethod
    def build(
        cls, requests: Sequence[Request], counts: Sequence[int], page_size: int, device: torch.device
    ) -> "FrozenRows":
        """Build the rows of a level.

        Args:
            requests: n requests.
            counts: rows of each request.
            page_size: slots per page.
            device: device of the target.
        """
        spans = []
        for request, count in zip(requests, counts, strict=True):
            newest = request.num_tokens - 2
            tokens = [request.get_token(newest)] * count
            if count == 1:
                spans.append(Span(request.pages, newest, tokens, (0,)))
            else:
                spans.append(Span(request.pages, newest, tokens, (0,), (-1,), node_subset=(0,) * count))
        batch = ForwardBatch.from_spans(spans, page_size, device)
        return cls(batch, batch.positions[0] + 1)


@dataclass(frozen=True)
class TargetKV:
    """Keys and values that the layers of an assistant read."""

    pool: KVPool
    layers: tuple[int, ...]  # layer of the target, by layer of the assistant
    shape: AssistantShape

    def attend(self, rows: FrozenRows, layer: int, query: Tensor) -> Tensor:
        """Attend from rotated queries [R, Hq, D] of a layer of the assistant. Returns [R, Hq, D]."""
        keys, values = self.pool.layers[self.layers[layer]]
        settings = PageAttention(1.0, self.shape.get_window(layer))
        return attend_pages(query, keys, values, rows.batch, self.pool, settings)


def find_target_layers(shape: AssistantShape, target: HFModel, folder: str) -> tuple[int, ...]:
    """Return the target's layer that each layer of an assistant reads: the last of its kind with keys of its own.

    Args:
        shape: shape of the assistant.
        target: target.
        folder: name of the assistant, for errors.

    Raises:
        ForedraftError: the target has no such layer, or heads of other sizes.
    """
    config = target.model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [FULL_ATTENTION] * target.num_layers
    own = kinds[: target.num_layers - (getattr(config, "num_kv_shared_layers", None) or 0)]
    last = {kind: i for i, kind in enumerate(own)}
    stored = _measure_heads(target)
    for layer, kind in enumerate(shape.layer_kinds):
        if kind not in last or last[kind] not in stored:
            raise ForedraftError(
                f"{folder} reads the keys and values of a layer of kind {kind}, and {target.name} has none; use a "
                "drafter for this target"
            )
        heads, head_dim = stored[last[kind]]
        if head_dim != shape.head_dims[layer] or shape.heads % heads:
            raise ForedraftError(
                f"{folder} has {shape.heads} query heads of {shape.head_dims[layer]} in layer {layer}, and the keys of "
                f"{target.name} have {heads} heads of {head_dim}; use a drafter for this target"
            )
    return tuple(last[kind] for kind in shape.layer_kinds)


@torch.inference_mode()
def _measure_heads(target: HFModel) -> dict[int, tuple[int, int]]:
    """Measure number and width of the key heads of every layer, in a pass over one token."""
    probe = target.with_new_kv()
    probe.forward(ForwardBatch.build([Span((1,), 0, (0,), (0,))], (0,), PROBE_PAGE_SIZE, target.device))
    sizes = {}
    for layer, (keys, _) in probe.pool.layers.items():
        width = keys.shape[2] - (SCALE_BYTES if keys.dtype == torch.int8 else 0)
        sizes[layer] = (keys.shape[1], width)
    return sizes
