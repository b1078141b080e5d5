"""What decides the size of a model that can be grown, and which larger one comes nearest to a number of parameters."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from foredraft.errors import ForedraftError

MULTIPLE = 128  # of the intermediate size
NEAR = 0.005  # of the size asked for: within it the proportions of the original decide
RATIOS = (1024, 256, 64, 16, 4, 1)  # powers of 4, so that the scale of the norms, a square root, is a power of 2


@dataclass(frozen=True)
class Shape(ABC):
    """The sizes of a model; a class of it for every architecture that can be grown."""

    hidden: int
    intermediate: int

    model_type: ClassVar[str]  # in config.json
    title: ClassVar[str]  # which models can be grown, in the plural
    writers: ClassVar[tuple[str, ...]]  # ends of the names of what adds to the hidden state, embeddings included

    @classmethod
    @abstractmethod
    def of(cls, model: Any) -> Self:
        """That of a model, not of its configuration: T5's says "tied" of any output."""

    @classmethod
    @abstractmethod
    def refusal(cls, config: Any) -> str | None:
        """Why such a model of this architecture cannot be grown."""

    @staticmethod
    @abstractmethod
    def maker() -> Any:
        """The class of transformers that makes a model of a configuration."""

    @property
    @abstractmethod
    def parameters(self) -> int: ...

    @abstractmethod
    def wider(self, ratio: int, further: int) -> Self:
        """`ratio` times as wide, with as many further layers, and without neurons."""

    @abstractmethod
    def changes(self, config: Any) -> dict[str, Any]:
        """What is different in the configuration of a model of this shape that was grown from one of `config`."""

    def norm_scale(self, name: str, small: "Shape", config: Any) -> float:
        """Of the weights of a norm: it divides by a mean that the further coordinates, all zero, dilute."""
        return float((small.hidden / self.hidden) ** 0.5)

    @abstractmethod
    def __str__(self) -> str: ...


S = TypeVar("S", bound=Shape)


def plan(small: S, parameters: int) -> S:
    """The widest shape of about that many parameters; near the count, the one of the most usual proportions."""
    for ratio in RATIOS:
        wide = [shape for shape in _of_width(small, ratio, parameters) if shape.parameters >= small.parameters]
        if wide:
            return min(wide, key=lambda shape: _strangeness(shape, small, ratio, parameters))
    raise ForedraftError(
        f"a model of {small.parameters / 1e6:.1f}M parameters cannot be grown to {parameters / 1e6:.1f}M; ask for more"
    )


def _of_width(small: S, ratio: int, parameters: int) -> Iterator[S]:
    for further in range(1 << 14):
        bare = small.wider(ratio, further)
        least = max(small.intermediate, bare.hidden)
        neuron = replace(bare, intermediate=1).parameters - bare.parameters  # one in every layer
        room = (parameters - bare.parameters) / neuron
        if room < least - MULTIPLE / 2:
            return
        yield replace(bare, intermediate=max(-(-least // MULTIPLE), round(room / MULTIPLE)) * MULTIPLE)


def _strangeness(shape: Shape, small: Shape, ratio: int, parameters: int) -> tuple[float, float]:
    error = abs(shape.parameters - parameters) / parameters
    usual = small.intermediate * ratio
    return (0.0 if error <= NEAR else error), max(shape.intermediate / usual, usual / shape.intermediate)


def table_rows(model: Any) -> int:
    """Rows of the embeddings, and of the output where it is not tied to them."""
    words, out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return len(words) + (0 if out is words else len(out))
