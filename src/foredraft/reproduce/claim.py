"""A claim of the literature, and what a measurement of it yields."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foredraft.bench.plot import CurvePanel
from foredraft.bench.report import ReportTable

if TYPE_CHECKING:
    from foredraft.reproduce.workbench import Workbench


@dataclass(frozen=True)
class Source:
    """A paper and what it states."""

    paper: str  # arXiv id
    title: str
    statement: str  # a sentence


@dataclass(frozen=True)
class Measurement:
    """Result of measuring a claim.

    Attributes:
        findings: sentences made of the measured figures.
        notes: conditions, one sentence each.
        tables: all figures.
        panels: axes of the plot.
        data: figures for JSON; dataclasses become objects.
    """

    findings: tuple[str, ...]
    notes: tuple[str, ...]
    tables: tuple[ReportTable, ...]
    panels: tuple[CurvePanel, ...]
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A claim with the function that measures it.

    Attributes:
        name: name on the command line, and of the files.
        title: heading of its pages.
        statement: the claim in one line.
        sources: the papers.
        minutes: expected time of the whole measurement on two cores.
        measure: measures the claim on the models of a workbench.
        fixed_models: why the claim is measured on the built-in models alone; "" = it takes other models.
        extra: name of the option of `ReproduceOptions` that this claim alone reads; "" = none.
        needs_extra: whether it cannot be measured without `extra`; then `extra_help` says where to get it.
        extra_help: end of the message for a missing `extra`.
    """

    name: str
    title: str
    statement: str
    sources: tuple[Source, ...]
    minutes: float
    measure: "Callable[[Workbench], Measurement]"
    fixed_models: str = ""
    extra: str = ""
    needs_extra: bool = False
    extra_help: str = ""
