"""`foredraft reproduce` on the command line."""

from pathlib import Path

from foredraft.cli.reproduce import ReproduceArguments
from foredraft.reproduce.registry import CLAIMS, find_claim


def test_without_names_it_lists_every_claim_with_papers_and_minutes(run):
    outcome = run("reproduce")
    lines = outcome.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [claim.name for claim in CLAIMS]
    for claim, line in zip(CLAIMS, lines, strict=True):
        assert f"{claim.minutes:g} min" in line
        assert all(source.paper in line for source in claim.sources)


def test_a_quick_run_prints_the_findings_and_writes_the_files(run, tmp_path):
    outcome = run("reproduce", "early_exit", "--quick", "--out", str(tmp_path / "out"))
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout == ""
    assert outcome.error_lines[0].startswith("early_exit: ")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md", "early_exit.json", "early_exit.md", "early_exit.png",
    }  # fmt: skip
    for file in (tmp_path / "out").glob("*.[mj]*"):
        assert str(tmp_path) not in file.read_text(), "a page names a path of this machine"


def test_mistakes_are_one_line(run, tmp_path):
    for arguments, message in (
        (["tree"], "unknown claim 'tree'"),
        (["all", "trees"], "'all' stands for every claim"),
        (["distillation"], "needs --undistilled FOLDER"),
        (["acceptance", "--model", "x"], "takes no --model"),
    ):
        outcome = run("reproduce", *arguments, "--out", str(tmp_path / "out"))
        assert outcome.code != 0
        [line] = outcome.error_lines
        assert message in line


def test_the_command_of_a_page_names_what_its_claim_reads(tmp_path):
    options = ReproduceArguments(
        ["trees"], tmp_path / "out", True, str(tmp_path), None, "heads-folder", "undistilled-folder", None, 2
    )
    assert options.format_command(find_claim("trees")) == (
        f"foredraft reproduce trees --model {tmp_path.name} --threads 2 --quick --out out"
    )
    assert "--heads heads-folder" in options.format_command(find_claim("medusa_heads"))
    assert ReproduceArguments(out=Path("docs/figures")).format_command(find_claim("block")).endswith("docs/figures")
