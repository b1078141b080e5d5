"""Declaration of how the drafters of one method are stored: layouts to read, the layout to write, formats to export.

A method declares one `CheckpointFormat`. The functions of this package get the formats of all methods as an argument,
so this package imports no method.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.target import ExportTarget
from foredraft.checkpoints.tensors import TensorFiles

# From stored tensor names and the content of config.json.
LayoutSign = Callable[[Collection[str], Mapping[str, Any]], bool]
# From the tensors of a folder, the content of its config.json and the target. Raises ForedraftError with the reason.
CheckpointReader = Callable[[TensorFiles, dict[str, Any], TargetInfo], Checkpoint]
# From the shape of a method and weights by internal name, exactly those that the shape requires.
LayoutMaker = Callable[[Any, Mapping[str, Tensor]], CheckpointLayout]
Exporter = Callable[[Checkpoint, ExportTarget], tuple[CheckpointLayout, list[str]]]  # layout, and notes for the user
CommandMaker = Callable[[str, str, str], str]  # from the target, the exported folder and the method's name


class LayoutOrder(IntEnum):
    """Order in which the signs of all layouts are checked. The first sign that holds decides.

    Signs of the same order must exclude each other; they are checked by method name.
    """

    DECLARED = 1  # config.json names the layout
    UNIQUE_NAMES = 2  # tensor names that even a whole model has only if it contains this drafter
    CONFIG_KEYS = 3  # keys of config.json, if no tensor name decides
    WHOLE_MODEL = 4  # tensor names of a whole language model
    OWN_NAMES = 5  # tensor names that no other method has
    MARKERS = 6  # some tensor names are those of other methods, and at least one is not
    SHARED_NAMES = 7  # all tensor names are those of other methods too
    ARCHITECTURE = 8  # only the architecture in config.json tells


def has_tensor(pattern: str | re.Pattern[str]) -> LayoutSign:
    """Make the sign that a folder has a tensor whose name begins with a match of a regular expression."""
    compiled = re.compile(pattern)
    return lambda names, config: any(map(compiled.match, names))


@dataclass(frozen=True)
class StoredLayout:
    """One way in which drafters of a method are stored."""

    name: str
    order: LayoutOrder
    matches: LayoutSign
    read: CheckpointReader | None = None  # None = not a head: the method loads the folder itself


@dataclass(frozen=True)
class ExportFormat:
    """Format of another engine that can represent a method's drafters."""

    name: str  # value of --format
    make: Exporter
    make_command: CommandMaker | None = None  # shell command that serves the folder; None = no engine serves it
    is_served: Callable[[Checkpoint], bool] = lambda checkpoint: True  # whether that engine reads this drafter alike
    copies_target: bool = False  # the folder is a copy of the target's with the drafter's tensors in it


@dataclass(frozen=True)
class CheckpointFormat:
    """How the drafters of one method are stored."""

    title: str  # with article, such as "an EAGLE head"
    layouts: tuple[StoredLayout, ...]
    shape: type | None = None  # class of `Checkpoint.shape`
    make_layout: LayoutMaker | None = None  # None = the method writes its folders itself
    exports: tuple[ExportFormat, ...] = ()
    refused_exports: Mapping[str, str] = field(default_factory=dict)  # reason, by name of a format
    no_exports: str = ", which no other engine loads"  # end of the error for a method without formats

    @property
    def has_reader(self) -> bool:
        """Whether the drafters are heads that this package reads."""
        return any(layout.read is not None for layout in self.layouts)

    def find_export(self, name: str) -> ExportFormat | None:
        """Return the format of this name; None if the method has none."""
        return next((entry for entry in self.exports if entry.name == name), None)


CheckpointFormats = Mapping[str, CheckpointFormat]  # by method
