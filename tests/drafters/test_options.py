"""The options of every method, from a dict: what is unknown or of another type is refused by name.

Guards against a value that no code reads until it is compared or counted in the middle of a step.
"""

from dataclasses import dataclass, fields
from typing import Any

import pytest

from foredraft.drafters.registry import load_methods, parse_options
from foredraft.errors import ForedraftError
from tests.support import tiny_models


@dataclass(frozen=True)
class Options:
    count: int = 1
    share: float = 0.5
    name: str | None = None
    flag: bool = False
    shape: tuple[int, ...] | str | None = None
    paths: tuple[tuple[int, ...], ...] | None = None


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("count", 2.5, "a whole number"),
        ("count", "many", "a whole number"),
        ("count", True, "a whole number"),
        ("count", None, "a whole number"),
        ("share", "nan", "a number"),
        ("name", 3, "a string"),
        ("flag", 1, "a bool"),
        ("shape", 3, "a list of whole numbers or a string"),
        ("shape", [2, "a"], "a list of whole numbers or a string"),
        ("paths", [0, 1], "a list of lists of whole numbers"),
        ("paths", [[0], [True]], "a list of lists of whole numbers"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"^the option {name} takes {wanted}, got "):
        parse_options(Options, {name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"count": 3, "share": 1, "name": "x", "flag": True},
        {"name": None, "shape": "published", "paths": [[0], [0, 1]]},
        {"shape": (2, 1), "paths": ((0,),)},
        {"shape": None, "paths": None, "share": 0.25},
    ],
)
def test_values_of_the_right_type_are_taken(options: dict[str, Any]) -> None:
    """JSON has lists instead of tuples, and whole numbers as floats."""
    made = parse_options(Options, options)
    assert {name: getattr(made, name) for name in options} == options


@pytest.mark.parametrize("method", load_methods())
def test_every_options_default_is_of_its_own_type(method: str) -> None:
    """Or the check would refuse what is the default."""
    entry = load_methods()[method]
    for config in (entry.config, *([] if entry.training is None else [entry.training.config])):
        parse_options(config, {spec.name: getattr(config(), spec.name) for spec in fields(config)})


def test_a_method_that_drafts_from_the_text_alone_refuses_a_model() -> None:
    """An ignored model would look to the user as if it drafted."""
    with pytest.raises(ForedraftError, match="leave its model 'somewhere' out"):
        tiny_models.plain().with_drafter({"method": "ngram", "model": "somewhere"})
