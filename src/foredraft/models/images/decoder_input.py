"""Input of a decoder for an image, taken from the code of the vision-language model itself.

The model runs up to its decoder: embeddings, image encoder, projector, and whatever its family does with positions and
masks. The arguments of the decoder then say what an image changes, so no code here depends on a family.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.models.attention import read_implementations
from foredraft.placed_images import EncodedImage

# Arguments of a decoder that say nothing about images.
NEUTRAL_ARGUMENTS = frozenset(
    "input_ids cache past_key_values use_cache cache_position return_dict output_attentions output_hidden_states "
    "labels logits_to_keep".split()
)
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers in a decoder's masks
Blocks = tuple[tuple[int, int], ...]
REMEDY = "leave max_images out to use it with text alone"


class _DecoderCallError(Exception):
    """The model has called its decoder."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@torch.no_grad()
def encode_image(model: Any, implementations: Mapping[str, str], inputs: Mapping[str, Any]) -> EncodedImage:
    """Run a model up to its decoder on the tokens of one image.

    Args:
        model: transformers model. No pass may run at the same time.
        implementations: the model's own attention, as of `read_implementations`.
        inputs: output of its processor for a prompt of one image alone, on the model's device.

    Raises:
        ForedraftError: the model gives its decoder something that the engine does not place.
    """
    arguments = _run_to_decoder(model, implementations, inputs)
    ids = inputs["input_ids"][0]
    embeddings = arguments.pop("inputs_embeds")[0]
    changed = (embeddings != model.get_input_embeddings()(ids)).any(-1)
    indices = changed.nonzero()[:, 0]
    if not len(indices):
        raise ForedraftError("the model puts no state of an image in place of an embedding; " + REMEDY)
    blocks, is_local = _find_blocks(arguments.pop("attention_mask", None))
    positions = _read_positions(arguments.pop("position_ids", None), len(ids))
    layer_states = _read_layer_states(arguments, changed)
    unknown = {
        name: value for name, value in arguments.items() if isinstance(value, Tensor) and name not in NEUTRAL_ARGUMENTS
    }
    if unknown:  # what follows from the token ids alone is made again in every pass
        plain = _run_to_decoder(model, implementations, {"input_ids": inputs["input_ids"]})
        unknown = {name: value for name, value in unknown.items() if not _equals(plain.get(name), value)}
    if unknown:
        raise ForedraftError(f"its decoder also reads {', '.join(unknown)} beside the embeddings; {REMEDY}")
    return EncodedImage(
        tuple(ids.tolist()),
        tuple(indices.tolist()),
        embeddings[indices].clone(),
        blocks,
        layer_states,
        positions,
        is_local,
    )


def _run_to_decoder(model: Any, implementations: Mapping[str, str], inputs: Mapping[str, Any]) -> dict[str, Any]:
    def stop(*_: Any, **arguments: Any) -> NoReturn:
        raise _DecoderCallError(arguments)

    decoder = model.get_decoder()
    original = vars(decoder).get("forward")
    with _use_implementations(model, implementations):
        decoder.forward = stop
        try:
            model(**inputs, use_cache=False)
        except _DecoderCallError as reached:
            return reached.arguments
        finally:
            del decoder.forward
            if original is not None:
                decoder.forward = original
    raise ForedraftError("the model does not call its decoder; " + REMEDY)


@contextmanager
def _use_implementations(model: Any, implementations: Mapping[str, str]) -> Iterator[None]:
    """Give the parts of a model their own attention, with the masks that belong to it."""
    current = read_implementations(model)
    if current == implementations:
        yield
        return
    model.set_attn_implementation(dict(implementations))
    try:
        yield
    finally:
        model.set_attn_implementation(current)


def _find_blocks(mask: Any) -> tuple[Blocks, bool]:
    """Find the runs of tokens that see each other in a mask, or in the masks of several kinds of layers.

    Returns:
        The blocks, and whether layers with a sliding window alone have them.
    """
    masks = mask if isinstance(mask, Mapping) else {FULL: mask}
    found = {name: _read_mask(each) for name, each in masks.items()}
    if len(set(found.values())) < 2:
        return next(iter(found.values()), ()), False
    if found.keys() == {FULL, SLIDING} and not found[FULL]:
        return found[SLIDING], True
    raise ForedraftError(f"its layers mask the tokens of an image in several ways; {REMEDY}")


def _read_mask(mask: Any) -> Blocks:
    """Read the blocks of the mask [1, 1, L, L] of one kind of layers. Another value is a causal mask."""
    return _read_blocks(mask[0, 0]) if isinstance(mask, Tensor) and mask.dim() == 4 else ()


def _read_blocks(mask: Tensor) -> Blocks:
    """Read the blocks of a mask [L, L] of visible keys, boolean or added to the scores."""
    visible = mask if mask.dtype == torch.bool else mask == 0
    length = len(visible)
    columns = torch.arange(length, device=mask.device)
    last = torch.where(visible, columns, 0).amax(1).tolist()
    blocks: list[tuple[int, int]] = []
    for row, end in enumerate(last):
        if end > row and not (blocks and row < blocks[-1][1]):
            blocks.append((row, end + 1))
    expected = torch.zeros_like(visible)
    for start, stop in blocks:
        expected[start:stop, start:stop] = True
    if not torch.equal(visible.triu(1), expected.triu(1)):
        raise ForedraftError(f"it masks the tokens of an image in a way that is no block of tokens; {REMEDY}")
    return tuple(blocks)


def _read_positions(positions: Tensor | None, length: int) -> Tensor | None:
    """Read positions [A, L]; None if they are the indices of the tokens."""
    if positions is None:
        return None
    found = positions.reshape(-1, length).cpu()
    return None if bool((found == torch.arange(length)).all()) and len(found) == 1 else found


def _read_layer_states(arguments: dict[str, Any], rows: Tensor) -> tuple[Tensor, ...]:
    """Take the states that are added after the first layers, [n, H] each."""
    states, mask = arguments.pop("deepstack_visual_embeds", None), arguments.pop("visual_pos_masks", None)
    if states is None:
        return ()
    if mask is None or not torch.equal(mask[0], rows):
        raise ForedraftError(f"it adds states after its layers at other places than the image's; {REMEDY}")
    return tuple(each.clone() for each in states)


def _equals(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and torch.equal(one, other)
