"""Files of a job: interrupted at any byte, resumed by the same job only, complete under the final name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.batch.job_files import JobFiles, JobKey
from foredraft.errors import ForedraftError

KEY = JobKey("digest", "{}", True, 0)
ROWS = [json.dumps({"custom_id": name}).encode() + b"\n" for name in "abc"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "new folder" / "out.jsonl"


def write(out, rows, key=KEY):
    files = JobFiles(out, key)
    with files.open():
        for row in rows:
            files.append(row)
    return files


@pytest.mark.parametrize("size", range(len(b"".join(ROWS)) + 1))
def test_a_file_cut_at_any_byte_keeps_its_whole_results(out, size):
    files = write(out, ROWS)
    files.part.write_bytes(b"".join(ROWS)[:size])
    again = JobFiles(out, KEY)
    with again.open():
        whole = size // len(ROWS[0])
        assert again.done == set("abc"[:whole])
        for row in ROWS[whole:]:
            again.append(row)
        again.finish()
    assert out.read_bytes() == b"".join(ROWS)
    assert sorted(file.name for file in out.parent.iterdir()) == ["out.jsonl"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (replace(KEY, input_digest="other"), "results of another input"),
        (replace(KEY, created=1), "results of another input"),
        (replace(KEY, settings="[]"), "results of other options"),
        (replace(KEY, is_ordered=False), "results of the other order"),
    ],
)
def test_another_job_does_not_go_on_with_the_file(out, key, message):
    write(out, ROWS[:1])
    with pytest.raises(ForedraftError, match=message), JobFiles(out, key).open():
        pass
    assert (out.parent / "out.jsonl.part").read_bytes() == ROWS[0]


def test_complete_results_are_not_replaced(out):
    files = write(out, ROWS)
    with files.open():
        files.finish()
    with pytest.raises(ForedraftError, match="exists and is complete"), JobFiles(out, KEY).open():
        pass
    assert out.read_bytes() == b"".join(ROWS)
    assert not files.job.exists()


def test_two_processes_do_not_write_one_file(out):
    with (
        JobFiles(out, KEY).open(),
        pytest.raises(ForedraftError, match="another process writes"),
        JobFiles(out, KEY).open(),
    ):
        pass


def test_an_end_between_the_rename_and_the_removal_of_the_job_is_a_complete_job(out):
    files = write(out, ROWS)
    files.part.rename(out)
    with pytest.raises(ForedraftError, match="exists and is complete"), JobFiles(out, KEY).open():
        pass


@pytest.mark.parametrize("name", ["", "folder"])
def test_a_folder_is_no_file_for_results(tmp_path, monkeypatch, name):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ForedraftError, match="is a folder"):
        JobFiles(Path(name), KEY)


def test_a_damaged_part_is_named(out):
    files = write(out, ROWS)
    files.part.write_bytes(ROWS[0] + b"{}\n")
    with pytest.raises(ForedraftError, match=r"out\.jsonl\.part is damaged"), JobFiles(out, KEY).open():
        pass
