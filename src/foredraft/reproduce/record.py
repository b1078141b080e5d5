"""Record of a measured claim: the JSON file that its table and the overview are made of."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foredraft.bench.report import BenchReport, ReportTable, describe_machine, format_machine_note
from foredraft.errors import ForedraftError
from foredraft.reproduce.claim import Claim, Measurement


@dataclass(frozen=True)
class ClaimRecord:
    """Content of NAME.json that the pages show."""

    name: str
    command: str
    is_quick: bool
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    machine: dict[str, Any]
    seconds: float
    tables: tuple[ReportTable, ...]

    @property
    def machine_note(self) -> str:
        """Processor, cores, threads and versions."""
        return format_machine_note(self.machine)


def build_record(claim: Claim, measurement: Measurement, command: str, is_quick: bool, seconds: float) -> ClaimRecord:
    """Build the record of a measurement that was made on this machine."""
    return ClaimRecord(
        claim.name, command, is_quick, measurement.findings, measurement.notes, describe_machine(), round(seconds, 1),
        measurement.tables,
    )  # fmt: skip


def write_record(record: ClaimRecord, data: dict[str, Any], title: str, path: Path) -> None:
    """Write a record and the figures that its tables are made of as JSON."""
    fields = {key: value for key, value in asdict(record).items() if key not in ("notes", "tables")}
    report = BenchReport(title, record.notes, (), {**fields, "tables": record.tables, "figures": data})
    path.write_text(report.json, encoding="utf-8")


def read_record(path: Path) -> ClaimRecord:
    """Read a record.

    Raises:
        ForedraftError: the file is no record.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        tables = tuple(
            ReportTable(t["title"], tuple(t["header"]), tuple(map(tuple, t["rows"])), t["num_name_columns"])
            for t in values["tables"]
        )
        return ClaimRecord(
            values["name"], values["command"], values["is_quick"], tuple(values["findings"]), tuple(values["notes"]),
            values["machine"], values["seconds"], tables,
        )  # fmt: skip
    except (ValueError, LookupError, TypeError) as error:
        raise ForedraftError(f"{path} is no record of `foredraft reproduce` ({error!r}); delete it") from None
