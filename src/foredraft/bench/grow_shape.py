"""Dimensions of a model that can be grown, and the larger shape nearest to a number of parameters."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from foredraft.errors import ForedraftError

INTERMEDIATE_MULTIPLE = 128  # of the intermediate size
SIZE_TOLERANCE = 0.005  # of the size asked for: within it the proportions of the original decide
WIDTH_RATIOS = (1024, 256, 64, 16, 4, 1)  # powers of 4, so that the scale of the norms, a square root, is a power of 2


@dataclass(frozen=True)
class ModelShape(ABC):
    """The sizes of a model; a class of it for every architecture that can be grown."""

    hidden: int
    intermediate: int

    model_type: ClassVar[str]  # in config.json
    title: ClassVar[str]  # which models can be grown, in the plural
    residual_writers: ClassVar[
        tuple[str, ...]
    ]  # ends of the names of what adds to the hidden state, embeddings included

    @classmethod
    @abstractmethod
    def from_model(cls, model: Any) -> Self:
        """That of a model, not of its configuration: T5's says "tied" of any output."""

    @classmethod
    @abstractmethod
    def get_obstacle(cls, config: Any) -> str | None:
        """Why such a model of this architecture cannot be grown."""

    @staticmethod
    @abstractmethod
    def get_auto_class() -> Any:
        """The class of transformers that makes a model of a configuration."""

    @property
    @abstractmethod
    def parameters(self) -> int: ...

    @abstractmethod
    def widen(self, ratio: int, extra_layers: int) -> Self:
        """`ratio` times as wide, with as many further layers, and without neurons."""

    @abstractmethod
    def get_config_changes(self, config: Any) -> dict[str, Any]:
        """Return the configuration entries that differ in a model of this shape grown from `config`."""

    def compute_norm_scale(self, name: str, small: "ModelShape", config: Any) -> float:
        """Compute the factor for a norm's weights: the added coordinates are zero and dilute its mean."""
        return float((small.hidden / self.hidden) ** 0.5)

    @abstractmethod
    def __str__(self) -> str: ...


S = TypeVar("S", bound=ModelShape)


def choose_shape(small: S, parameters: int) -> S:
    """The widest shape of about that many parameters; near the count, the one of the most usual proportions."""
    for ratio in WIDTH_RATIOS:
        wide = [shape for shape in _iter_shapes(small, ratio, parameters) if shape.parameters >= small.parameters]
        if wide:
            return min(wide, key=lambda shape: _score_shape(shape, small, ratio, parameters))
    raise ForedraftError(
        f"a model of {small.parameters / 1e6:.1f}M parameters cannot be grown to {parameters / 1e6:.1f}M; ask for more"
    )


def _iter_shapes(small: S, ratio: int, parameters: int) -> Iterator[S]:
    for further in range(1 << 14):
        bare = small.widen(ratio, further)
        least = max(small.intermediate, bare.hidden)
        neuron = replace(bare, intermediate=1).parameters - bare.parameters  # one in every layer
        room = (parameters - bare.parameters) / neuron
        if room < least - INTERMEDIATE_MULTIPLE / 2:
            return
        yield replace(
            bare,
            intermediate=max(-(-least // INTERMEDIATE_MULTIPLE), round(room / INTERMEDIATE_MULTIPLE))
            * INTERMEDIATE_MULTIPLE,
        )


def _score_shape(shape: ModelShape, small: ModelShape, ratio: int, parameters: int) -> tuple[float, float]:
    error = abs(shape.parameters - parameters) / parameters
    usual = small.intermediate * ratio
    return (0.0 if error <= SIZE_TOLERANCE else error), max(shape.intermediate / usual, usual / shape.intermediate)


def count_embedding_rows(model: Any) -> int:
    """Rows of the embeddings, and of the output where it is not tied to them."""
    words, out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return len(words) + (0 if out is words else len(out))
