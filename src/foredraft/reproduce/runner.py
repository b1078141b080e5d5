"""Run of claims: checks first, then one measurement after the other, each written as soon as it is made."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.bench.plot import save_curves
from foredraft.bench.report import require_matplotlib
from foredraft.errors import ForedraftError
from foredraft.reproduce.claim import Claim
from foredraft.reproduce.pages import OVERVIEW_TITLE, render_claim_page, render_overview
from foredraft.reproduce.record import ClaimRecord, build_record, read_record, write_record
from foredraft.reproduce.registry import CLAIMS
from foredraft.reproduce.workbench import TARGET_NOTE, ReproduceOptions, Workbench

OVERVIEW_FILE = "README.md"


@dataclass(frozen=True)
class ReproduceRun:
    """Claims to measure and the folder of the results.

    Attributes:
        claims: claims, in order.
        options: models and sizes.
        out: folder; it is created if it does not exist.
        command: maker of the command of one claim, for the pages.
        on_progress: called with a title before every step.
        on_result: called with every record once its files are written.
    """

    claims: tuple[Claim, ...]
    options: ReproduceOptions
    out: Path
    command: Callable[[Claim], str]
    on_progress: Callable[[str], None] = lambda title: None
    on_result: Callable[[ClaimRecord], None] = lambda record: None

    def check(self) -> None:
        """Check before a long measurement that every claim can be measured and written.

        Raises:
            ForedraftError: matplotlib or a folder is missing, a claim takes no other models, no claim reads an option,
                or `out` holds files of another kind.
        """
        require_matplotlib()
        for claim in CLAIMS:
            if claim.extra and claim not in self.claims and self.options.get_extra(claim.extra) is not None:
                raise ForedraftError(
                    f"--{claim.extra} belongs to the claim {claim.name}; leave one out or add the other"
                )
        for claim in self.claims:
            reason = find_obstacle(claim, self.options)
            if reason is not None:
                raise ForedraftError(reason)
        if self.out.exists() and not self.out.is_dir():
            raise ForedraftError(f"--out {str(self.out)!r} is a file; give a folder")
        overview = self.out / OVERVIEW_FILE
        if overview.exists() and not overview.read_text(encoding="utf-8").startswith(OVERVIEW_TITLE):
            raise ForedraftError(
                f"{overview} is another document and would be replaced by the overview; give another folder with --out"
            )

    def run(self) -> list[ClaimRecord]:
        """Measure all claims and write their files.

        Raises:
            ForedraftError: as `check`, or a measurement failed.
        """
        self.check()
        self.out.mkdir(parents=True, exist_ok=True)
        records = []
        with tempfile.TemporaryDirectory(prefix="foredraft-reproduce-") as folder:
            bench = Workbench(self.options, Path(folder), self.on_progress)
            for claim in self.claims:
                records.append(self._measure(claim, bench))
                write_overview(self.out)
                self.on_result(records[-1])
        return records

    def _measure(self, claim: Claim, bench: Workbench) -> ClaimRecord:
        start = time.perf_counter()
        measurement = claim.measure(bench)
        seconds = time.perf_counter() - start
        record = build_record(claim, measurement, self.command(claim), self.options.is_quick, seconds)
        write_record(record, measurement.data, claim.title, self.out / f"{claim.name}.json")
        (self.out / f"{claim.name}.md").write_text(render_claim_page(claim, record), encoding="utf-8")
        targets = [note for note in record.notes if note.startswith(TARGET_NOTE)]
        caption = "\n".join([*targets, record.machine_note])
        save_curves(measurement.panels, caption, self.out / f"{claim.name}.png")
        return record


def find_obstacle(claim: Claim, options: ReproduceOptions) -> str | None:
    """Find why a claim cannot be measured with these options; None = it can."""
    if claim.fixed_models and (options.model or options.spec_model):
        return f"{claim.name} takes no --model and no --spec-model: {claim.fixed_models}; leave them out"
    if claim.needs_extra and options.get_extra(claim.extra) is None:
        return f"{claim.name} needs --{claim.extra} FOLDER: {claim.extra_help}"
    return None


def select_possible(options: ReproduceOptions, claims: Sequence[Claim] = CLAIMS) -> tuple[Claim, ...]:
    """Select the claims that can be measured with these options."""
    return tuple(claim for claim in claims if find_obstacle(claim, options) is None)


def read_records(folder: Path) -> dict[str, ClaimRecord]:
    """Read the records in a folder, by claim."""
    paths = {claim.name: folder / f"{claim.name}.json" for claim in CLAIMS}
    return {name: read_record(path) for name, path in paths.items() if path.exists()}


def write_overview(folder: Path) -> None:
    """Write the overview of the records in a folder."""
    (folder / OVERVIEW_FILE).write_text(render_overview(read_records(folder)), encoding="utf-8")
