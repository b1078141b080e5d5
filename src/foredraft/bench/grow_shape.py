"""Dimensions of a model that can be grown, and the larger shape nearest to a number of parameters."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from foredraft.errors import ForedraftError

INTERMEDIATE_MULTIPLE = 128  # the intermediate size is a multiple of this
SIZE_TOLERANCE = 0.005  # relative; among shapes this close to the requested size, the proportions decide
WIDTH_RATIOS = (1024, 256, 64, 16, 4, 1)  # powers of 4: the scale of the norms is the root, an exact power of 2
MAX_EXTRA_LAYERS = 1 << 14  # layers beyond those of the original


@dataclass(frozen=True)
class ModelShape(ABC):
    """Dimensions of a model; one subclass per architecture that can be grown."""

    hidden: int
    intermediate: int

    model_type: ClassVar[str]  # in config.json
    title: ClassVar[str]  # supported models, as an error message names them, in the plural
    # Suffixes of the names of weights that add to the hidden state, embeddings included.
    residual_writers: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def from_model(cls, model: Any) -> Self:
        """Read the shape from the weights: a T5 configuration reports tied embeddings even if they are not."""

    @classmethod
    @abstractmethod
    def explain_unsupported(cls, config: Any) -> str | None:
        """Return why a model with this configuration cannot be grown, or None."""

    @staticmethod
    @abstractmethod
    def get_auto_class() -> Any:
        """Return the class of transformers that creates a model from a configuration."""

    @property
    @abstractmethod
    def parameters(self) -> int: ...

    @abstractmethod
    def widen(self, ratio: int, extra_layers: int) -> Self:
        """Return a shape that is `ratio` times as wide, has `extra_layers` more layers and no neurons."""

    @abstractmethod
    def get_config_changes(self, config: Any) -> dict[str, Any]:
        """Return the configuration entries that differ in a model of this shape grown from `config`."""

    def compute_norm_scale(self, name: str, small: "ModelShape", config: Any) -> float:
        """Compute the factor for the weights of a norm: added coordinates are zero and lower its mean square."""
        return float((small.hidden / self.hidden) ** 0.5)

    @abstractmethod
    def __str__(self) -> str: ...


S = TypeVar("S", bound=ModelShape)


def choose_shape(small: S, parameters: int) -> S:
    """Choose the widest shape with about `parameters` parameters.

    Among shapes within SIZE_TOLERANCE the one with proportions closest to `small` is chosen.

    Raises:
        ForedraftError: no shape of about this size is at least as large as `small`.
    """
    for ratio in WIDTH_RATIOS:
        shapes = [shape for shape in _iter_shapes(small, ratio, parameters) if shape.parameters >= small.parameters]
        if shapes:
            return min(shapes, key=lambda shape: _score_shape(shape, small, ratio, parameters))
    raise ForedraftError(
        f"a model of {small.parameters / 1e6:.1f}M parameters cannot be grown to {parameters / 1e6:.1f}M; "
        "give a larger size"
    )


def _iter_shapes(small: S, ratio: int, parameters: int) -> Iterator[S]:
    for extra_layers in range(MAX_EXTRA_LAYERS):
        without_neurons = small.widen(ratio, extra_layers)
        min_intermediate = max(small.intermediate, without_neurons.hidden)
        # One more neuron in every layer.
        parameters_per_neuron = replace(without_neurons, intermediate=1).parameters - without_neurons.parameters
        num_neurons = (parameters - without_neurons.parameters) / parameters_per_neuron
        if num_neurons < min_intermediate - INTERMEDIATE_MULTIPLE / 2:
            return
        yield replace(
            without_neurons,
            intermediate=max(-(-min_intermediate // INTERMEDIATE_MULTIPLE), round(num_neurons / INTERMEDIATE_MULTIPLE))
            * INTERMEDIATE_MULTIPLE,
        )


def _score_shape(shape: ModelShape, small: ModelShape, ratio: int, parameters: int) -> tuple[float, float]:
    error = abs(shape.parameters - parameters) / parameters
    proportional_size = small.intermediate * ratio
    return (0.0 if error <= SIZE_TOLERANCE else error), max(
        shape.intermediate / proportional_size, proportional_size / shape.intermediate
    )


def count_embedding_rows(model: Any) -> int:
    """Count the rows of the input embeddings, plus those of the output embeddings unless the two are tied."""
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return len(inputs) + (0 if outputs is inputs else len(outputs))
