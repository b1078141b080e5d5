"""Revisions of a hub id, of target and drafter, and a tokenizer of another folder; the hub's cache is made here."""

from pathlib import Path

import pytest

from foredraft import LLM, Sampling, zoo
from foredraft.errors import ForedraftError
from foredraft.files.hub import find_revision
from tests.support import tiny_models

OLD, NEW = "1" * 40, "2" * 40
GREEDY = Sampling(temperature=0, max_tokens=8)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with two revisions of owner/model: `main` is the new one, the tag v1 the old one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--owner--model"
    for seed, commit in enumerate((OLD, NEW)):
        tiny_models.llama(seed=seed).save_pretrained(folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(NEW)
    (folder / "refs/v1").write_text(OLD)
    return folder / "snapshots"


def generate(llm: LLM) -> list[int]:
    return llm.generate([[5, 6, 7]], GREEDY)[0].token_ids


@pytest.mark.parametrize(("revision", "seed"), [("v1", 0), (OLD, 0), ("main", 1)])
@pytest.mark.usefixtures("cache")
def test_the_revision_decides_the_weights_of_the_target(revision: str, seed: int) -> None:
    llm = LLM("owner/model", revision=revision)
    assert generate(llm) == generate(LLM(tiny_models.llama(seed=seed)))
    assert llm.target.name == "owner/model"


@pytest.mark.usefixtures("cache")
def test_the_revision_of_a_draft_model_is_its_own() -> None:
    plain = LLM("owner/model", revision="v1")
    spec = {"model": "owner/model", "num_speculative_tokens": 3}
    same, other = plain.with_drafter({**spec, "revision": "v1"}), plain.with_drafter({**spec, "revision": "main"})
    assert generate(same) == generate(other) == generate(plain)
    # two revisions of one model as two members
    both = {"method": "draft_model+draft_model", "num_speculative_tokens": 3}
    both |= {f"{name}.model": "owner/model" for name in ("draft_model", "draft_model_2")}
    llm = plain.with_drafter({**both, "draft_model.revision": "v1", "draft_model_2.revision": "main"})
    assert generate(llm) == generate(plain)


@pytest.mark.usefixtures("cache")
def test_an_unknown_revision_and_that_of_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match=r"owner/model \(revision v9\) is not in the local cache"):
        LLM("owner/model", revision="v9")
    with pytest.raises(ForedraftError, match="is a local folder, which has no revisions"):
        LLM(str(tmp_path), revision="main")
    with pytest.raises(ForedraftError, match="a loaded model has no revision"):
        LLM(tiny_models.llama(), revision="main")
    with pytest.raises(ForedraftError, match="a branch, tag or commit"):
        find_revision("owner/model", 3)  # type: ignore[arg-type]


def test_a_tokenizer_of_another_folder(tmp_path: Path) -> None:
    folder = zoo.find_target_folder(zoo.DEFAULT_TARGET)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    assert LLM(str(tmp_path)).tokenizer is None
    llm = LLM(str(tmp_path), tokenizer=str(folder))
    assert llm.generate("def f(", GREEDY)[0].text == LLM(drafter=None).generate("def f(", GREEDY)[0].text
    with pytest.raises(ForedraftError, match="has no tokenizer; give the folder of a tokenizer"):
        LLM(str(tmp_path), tokenizer=str(tmp_path))
