"""The target that a drafter's folder names: found from any directory, the same one, without revealing a path."""

import json
import shutil
from pathlib import Path

import pytest

from foredraft import zoo
from foredraft.checkpoints.read import find_named_target
from foredraft.checkpoints.target import ExportTarget
from foredraft.checkpoints.target_reference import TARGET_NAME_KEY, TARGET_RECORD_KEY, describe_target
from foredraft.drafters.checkpoint_folders import export, read
from foredraft.errors import ForedraftError
from tests.support import tiny_models
from tests.support.checkpoints import published_folders
from tests.support.checkpoints.published_folders import TARGET


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tiny_models.llama().save_pretrained(tmp_path / "models" / "llama")
    return tmp_path


def head(place: Path, target: str) -> Path:
    folder = place / "heads" / "head"
    return published_folders.medusa(folder, **describe_target(target, folder))


def test_a_relative_target_is_found_from_another_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    folder = head(place, "models/llama")
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    assert find_named_target(folder) == str(place / "models" / "llama")


def test_both_folders_may_move_together(place: Path) -> None:
    head(place, str(place / "models" / "llama"))
    moved = place.with_name(place.name + "-moved")
    shutil.move(place, moved)
    assert find_named_target(moved / "heads" / "head") == str(moved / "models" / "llama")


def test_another_model_at_that_place_is_refused(place: Path) -> None:
    folder = head(place, str(place / "models" / "llama"))
    tiny_models.llama(seed=5).save_pretrained(place / "models" / "llama")
    with pytest.raises(ForedraftError, match=r"was trained for another model than the one in .*give its target with"):
        find_named_target(folder)


def test_without_the_target_its_name_is_what_is_known(place: Path) -> None:
    folder = head(place, str(place / "models" / "llama"))
    shutil.rmtree(place / "models")
    assert find_named_target(folder) == "llama"


def test_no_absolute_path_is_written_and_none_at_all_into_an_export(place: Path) -> None:
    target = place / "models" / "llama"
    folder = head(place, str(target))
    assert str(place) not in (folder / "config.json").read_text()
    facts = ExportTarget(TARGET.__class__(str(target), TARGET.hidden, TARGET.vocab_size, TARGET.num_layers), ("X",))
    export(read(folder, facts.info), "medusa", place / "out", facts)
    said = json.loads((place / "out" / "config.json").read_text())
    assert said[TARGET_NAME_KEY] == "llama"
    assert set(said[TARGET_RECORD_KEY]) == {"name", "digest"}
    assert str(place) not in (place / "out" / "config.json").read_text()


def test_hub_ids_and_built_in_targets_are_names_already() -> None:
    assert describe_target("org/name", Path("x")) == {TARGET_NAME_KEY: "org/name"}
    assert describe_target(str(zoo.find_folder("target")), Path("x")) == {TARGET_NAME_KEY: "builtin"}
