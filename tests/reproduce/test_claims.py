"""`foredraft reproduce`: every claim runs, and its files hold what was measured."""

import json
from pathlib import Path

import pytest

from foredraft import ForedraftError, zoo
from foredraft.bench.report import ReportTable
from foredraft.reproduce.claim import Claim
from foredraft.reproduce.pages import render_claim_page, render_overview
from foredraft.reproduce.pairs import PAIRS
from foredraft.reproduce.record import read_record
from foredraft.reproduce.registry import CLAIMS, find_claim
from foredraft.reproduce.runner import ReproduceRun, find_obstacle, read_records, select_possible
from foredraft.reproduce.workbench import ReproduceOptions
from tests.support import tiny_models

NAMES = [claim.name for claim in CLAIMS]
DRAFT = str(zoo.find_folder("draft_2"))  # a draft model in place of the undistilled one, which no installation has
QUICK = ReproduceOptions(is_quick=True)
QUICK_DISTILLATION = ReproduceOptions(undistilled=DRAFT, is_quick=True)
PNG = b"\x89PNG\r\n\x1a\n"
SPEED_UPS = ("speed-up", "over plain")  # headings of the measured ones
MODEL_CLAIMS = ["draft_length", "trees", "serving", "load", "lookahead", "early_exit", "block"]


def run(names: list[str], options: ReproduceOptions, out: Path) -> None:
    claims = tuple(map(find_claim, names))
    ReproduceRun(claims, options, out, lambda claim: f"foredraft reproduce {claim.name}").run()


def list_values(figures: object) -> list[float]:
    """List all numbers in the figures of a JSON file."""
    if isinstance(figures, dict):
        return [value for part in figures.values() for value in list_values(part)]
    if isinstance(figures, list):
        return [value for part in figures for value in list_values(part)]
    return [float(figures)] if isinstance(figures, int | float) else []


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_writes_what_it_measured(name, tmp_path):
    run([name], QUICK_DISTILLATION if name == "distillation" else QUICK, tmp_path)
    claim, record = find_claim(name), read_record(tmp_path / f"{name}.json")
    assert record.findings
    assert all(table.rows for table in record.tables)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    assert (tmp_path / f"{name}.md").read_text() == render_claim_page(claim, record)
    assert (tmp_path / "README.md").read_text() == render_overview({name: record})
    figures = {f"{value:.2f}" for value in list_values(json.loads((tmp_path / f"{name}.json").read_text())["figures"])}
    speed_ups = [cell for table in record.tables for cell in list_speed_ups(table)]
    assert speed_ups
    assert {cell.removesuffix("x") for cell in speed_ups} <= figures


def list_speed_ups(table: ReportTable) -> list[str]:
    """List the cells of measured speed-ups."""
    columns = [i for i, title in enumerate(table.header) if title in SPEED_UPS or title.endswith("/ off")]
    return [row[i] for row in table.rows for i in columns]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, str]:
    """A tiny target, a draft model and a question file."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in (("target", tiny_models.llama(320)), ("draft", tiny_models.llama(320, hidden=16))):
        model.float().save_pretrained(folder / name)
        tiny_models.tokenizer().save_pretrained(folder / name)
    (folder / "q.jsonl").write_text('{"turns": ["the end and the", "then"]}\n{"turns": ["def and"]}\n')
    return {name: str(folder / name) for name in ("target", "draft", "q.jsonl")}


@pytest.mark.parametrize("name", MODEL_CLAIMS)
def test_a_given_pair_is_measured_instead_of_the_built_in_one(name, tiny, tmp_path):
    drafter = None if name in ("lookahead", "early_exit") else tiny["draft"]
    run([name], ReproduceOptions(tiny["target"], drafter, questions=Path(tiny["q.jsonl"]), is_quick=True), tmp_path)
    record = read_record(tmp_path / f"{name}.json")
    assert record.notes[0].startswith("target target:")
    assert "built-in" not in " ".join((*record.notes, *record.findings))


def test_claims_of_one_command_share_their_models(tmp_path):
    steps: list[str] = []
    claims = (find_claim("lookahead"), find_claim("trees"))
    ReproduceRun(claims, QUICK, tmp_path, lambda claim: claim.name, steps.append).run()
    assert steps.count("growing the built-in target") == 1
    assert set(read_records(tmp_path)) == {"lookahead", "trees"}


def test_all_claims_take_at_most_half_an_hour():
    assert sum(claim.minutes for claim in CLAIMS) <= 30


def test_names_of_files_and_sections_are_distinct():
    assert len(set(NAMES)) == len(NAMES) == len({claim.title for claim in CLAIMS})


def test_every_pair_names_a_claim_that_takes_models():
    for pair in PAIRS:
        assert not find_claim(pair.claim).fixed_models
        assert pair.command in render_overview({})


OTHER_MODEL = ReproduceOptions(model="somewhere")


@pytest.mark.parametrize(
    ("claim", "options", "message"),
    [
        (find_claim("acceptance"), OTHER_MODEL, "takes no --model"),
        (find_claim("distillation"), ReproduceOptions(), "needs --undistilled FOLDER: .*foredraft zoo train"),
        (find_claim("trees"), ReproduceOptions(heads="somewhere"), "--heads belongs to the claim medusa_heads"),
        (find_claim("trees"), ReproduceOptions(undistilled="somewhere"), "--undistilled belongs to the claim dist"),
    ],
)
def test_a_claim_that_cannot_be_measured_is_refused_first(claim: Claim, options, message, tmp_path):
    with pytest.raises(ForedraftError, match=message):
        ReproduceRun((CLAIMS[-1], claim), options, tmp_path / "out", lambda claim: "").run()
    assert not (tmp_path / "out").exists()


def test_all_leaves_out_what_the_options_do_not_allow():
    assert [claim.name for claim in select_possible(ReproduceOptions())] == [n for n in NAMES if n != "distillation"]
    assert "acceptance" not in [claim.name for claim in select_possible(OTHER_MODEL)]
    assert all(find_obstacle(claim, QUICK_DISTILLATION) is None for claim in CLAIMS)


def test_another_document_is_not_replaced(tmp_path):
    (tmp_path / "README.md").write_text("# My project\n")
    with pytest.raises(ForedraftError, match="another document"):
        run(["block"], QUICK, tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My project\n"


def test_an_unknown_claim_is_answered_with_the_names():
    with pytest.raises(ForedraftError, match=r"use one of: acceptance, .*trees"):
        find_claim("tree")


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "block.json").write_text("{}")
    with pytest.raises(ForedraftError, match=r"block\.json is no record"):
        read_records(tmp_path)
