"""Metrics page of all replicas, with a label `replica`, and the front's own counts."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_SAMPLE_PATTERN = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+(?: \S+)?)")


@dataclass(frozen=True)
class FrontMetrics:
    """Numbers of requests since the start of the front."""

    choices: Counter[str] = field(default_factory=Counter)  # by reason: stored, session, prefix, load
    broken: Counter[str] = field(default_factory=Counter)  # by replica: requests whose replica stopped
    rerouted: Counter[str] = field(default_factory=Counter)  # by replica: requests that another replica took

    def render(self, loads: Mapping[str, int]) -> str:
        """Render the front's own families.

        Args:
            loads: running requests of each replica.
        """
        families = (
            ("foredraft:replicas", "gauge", "Replicas that take requests.", {"": len(loads)}),
            ("foredraft:front_requests_running", "gauge", "Running requests of a replica.", _label("replica", loads)),
            ("foredraft:front_choices_total", "counter", "Choices by reason.", _label("reason", self.choices)),
            (
                "foredraft:front_broken_total",
                "counter",
                "Requests whose replica stopped.",
                _label("replica", self.broken),
            ),
            (
                "foredraft:front_rerouted_total",
                "counter",
                "Requests that a replica refused and another one took.",
                _label("replica", self.rerouted),
            ),
        )
        lines = []
        for name, kind, help_text, samples in families:
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{labels} {value}" for labels, value in samples.items()]
        return "".join(f"{line}\n" for line in lines)


def _label(label: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f'{{{label}="{_escape(value)}"}}': count for value, count in counts.items()}


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def join_pages(pages: Mapping[str, str]) -> str:
    """Join pages in Prometheus's text format; every sample gets the label `replica`, every family stays in one piece.

    Args:
        pages: text of each replica.
    """
    families: dict[str, list[str]] = {}  # comment lines of a family -> its samples
    for replica, page in pages.items():
        comments = ""
        samples: list[str] = []
        for line in page.splitlines():
            if line.startswith("# HELP"):
                comments = ""
            if line.startswith("#"):
                comments += f"{line}\n"
                samples = families.setdefault(comments, []) if line.startswith("# TYPE") else samples
            elif line:
                samples.append(add_label(line, replica))
    return "".join(comments + "".join(f"{line}\n" for line in samples) for comments, samples in families.items())


def add_label(line: str, replica: str) -> str:
    """Add the label `replica` to one sample."""
    match = _SAMPLE_PATTERN.fullmatch(line)
    if match is None:
        raise ValueError(f"no sample of Prometheus's text format: {line!r}")
    labels = f'replica="{_escape(replica)}"' + (f",{match['labels']}" if match["labels"] else "")
    return f"{match['name']}{{{labels}}} {match['value']}"
