"""docs/figures: no figure without its command, and no page that differs from its JSON file."""

from pathlib import Path

import pytest

from foredraft.reproduce.pages import render_claim_page, render_overview
from foredraft.reproduce.record import ClaimRecord, read_record
from foredraft.reproduce.registry import CLAIMS, find_claim
from foredraft.reproduce.runner import read_records

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
RECORDS = read_records(FIGURES)


def test_the_overview_is_made_of_the_records():
    assert (FIGURES / "README.md").read_text() == render_overview(RECORDS), "run foredraft reproduce --out docs/figures"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_page_and_plot_has_its_record(claim):
    files = {FIGURES / f"{claim.name}.{ending}" for ending in ("json", "md", "png")}
    assert sum(file.exists() for file in files) in (0, len(files))
    if claim.name in RECORDS:
        check_record(RECORDS[claim.name])


def check_record(record: ClaimRecord) -> None:
    assert not record.is_quick, "a quick run is no measurement"
    assert record.command.startswith(f"foredraft reproduce {record.name} ")
    assert (FIGURES / f"{record.name}.md").read_text() == render_claim_page(find_claim(record.name), record)


def test_no_other_files_stand_among_the_figures():
    names = {claim.name for claim in CLAIMS}
    assert {path.stem for path in FILES} <= names | {"README"}


FILES = list(FIGURES.iterdir())


def test_a_page_differs_if_its_record_does(tmp_path):
    path = next(iter(FIGURES.glob("*.json")), None)
    if path is None:
        assert "Not measured in this folder" in render_overview({})
        return
    record = read_record(path)
    other = tmp_path / path.name
    other.write_text(path.read_text().replace(record.findings[0], "nothing was found"))
    claim = find_claim(record.name)
    assert render_claim_page(claim, read_record(other)) != render_claim_page(claim, record)
