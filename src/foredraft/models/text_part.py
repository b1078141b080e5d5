"""Text part of multimodal models: the modules that text reads, and model classes without the others.

A multimodal model embeds the tokens, puts states of images and sounds in place of some of them, and runs a decoder and
a head. These functions run it with a decoder that returns its input, which shows what happens around the decoder.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.models.attention import ATTENTION_NAME, read_implementations


class _EchoedOutput(dict[str, Any]):
    """Output of a decoder that has nothing but hidden states."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__("last_hidden_state" if key == 0 else key)


def make_text_class(whole: Any) -> type | None:
    """Make the class of a multimodal model without the modules that text does not reach, such as image encoders.

    transformers then reads none of their weights. Everything else, names included, is that of the original class.

    Args:
        whole: model of the original class on device meta; its other modules are removed.

    Returns:
        The class, or None if there are no such modules, or if the model does not run without them.
    """
    try:
        paths = list_other_parts(whole)
        _remove_modules(whole, paths)
        _run_around_decoder(whole)
    except Exception:  # the model's own code may raise any exception without these modules
        return None
    if not paths:
        return None
    kind: Any = type(whole)
    names = sorted({path.rpartition(".")[2] for path in paths})
    ignored = [*(kind._keys_to_ignore_on_load_unexpected or ()), *(rf"(^|\.){re.escape(name)}\." for name in names)]

    class TextModel(kind):  # type: ignore[misc]
        """Multimodal model with its text part alone."""

        __module__ = kind.__module__  # transformers treats classes of other packages differently
        _keys_to_ignore_on_load_unexpected = ignored

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            _remove_modules(self, paths)

    TextModel.__name__ = kind.__name__
    TextModel.__qualname__ = kind.__qualname__
    return TextModel


def is_plain_wrapper(model: Any) -> bool:
    """Whether the logits of text are those of the head over the decoder over the embeddings, and nothing else."""
    try:
        inputs, logits = _run_around_decoder(model)
    except Exception:  # the model's own code may raise any exception in a pass of this kind
        return False
    expected_inputs = model.get_input_embeddings()(_make_pair(model))
    if inputs.shape != expected_inputs.shape or not torch.equal(inputs, expected_inputs):
        return False
    expected = model.get_output_embeddings()(inputs)
    return logits.shape == expected.shape and torch.allclose(logits.to(expected.dtype), expected)


def _make_pair(model: Any) -> Tensor:
    return torch.tensor([[0, 1]], device=model.device)


@torch.no_grad()
def _run_around_decoder(model: Any) -> tuple[Tensor, Tensor]:
    """Run two tokens through a model whose decoder returns its input.

    Returns:
        Input of the decoder [1, 2, H], and logits [1, 2, V].

    Raises:
        RuntimeError: the decoder was not called once, with embeddings. The model's code may raise other exceptions.
    """
    decoder, inputs = model.get_decoder(), []

    def echo(*, inputs_embeds: Tensor, **unused: Any) -> _EchoedOutput:
        inputs.append(inputs_embeds)
        return _EchoedOutput(last_hidden_state=inputs_embeds)

    original = vars(decoder).get("forward")
    implementations, pair = read_implementations(model), _make_pair(model)
    decoder.forward = echo
    try:
        model.set_attn_implementation(ATTENTION_NAME)  # transformers builds no mask for it
        logits = model(input_ids=pair, position_ids=pair, use_cache=False).logits
    finally:
        del decoder.forward
        if original is not None:
            decoder.forward = original
        model.set_attn_implementation(implementations)
    if len(inputs) != 1:
        raise RuntimeError(f"the decoder ran {len(inputs)} times")
    return inputs[0], logits


def find_other_parts(model: Any) -> list[str]:
    """List the paths of the modules with weights that text does not reach; none for a model of text alone."""
    return [] if model.config.get_text_config() is model.config else list_other_parts(model)


def list_other_parts(model: Any) -> list[str]:
    """List the paths of the modules with weights beside the decoder, the embeddings and the head."""
    decoder = model.get_decoder()
    if decoder is model:
        return []
    read = {id(part) for part in (decoder, model.get_input_embeddings(), model.get_output_embeddings())}
    return list(_iterate_other_parts(model, "", read))


def _iterate_other_parts(module: nn.Module, prefix: str, read: set[int]) -> Iterator[str]:
    for name, child in module.named_children():
        if id(child) in read:
            continue
        if any(id(part) in read for part in child.modules()):
            yield from _iterate_other_parts(child, f"{prefix}{name}.", read)
        elif any(True for _ in child.parameters()):
            yield prefix + name


def _remove_modules(model: Any, paths: Sequence[str]) -> None:
    """Put None in place of modules, and forget which of their weights are tied."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, None)
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {
        key: source for key, source in tied.items() if not key.startswith(tuple(f"{path}." for path in paths))
    }
