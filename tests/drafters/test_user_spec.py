"""Drafter options as a user writes them: the model implies the method, and a misspelt word gets a suggestion."""

from pathlib import Path

import pytest
import torch

from foredraft import LLM, Sampling
from foredraft.drafters.eagle3.method import TrainConfig, create_trainee
from foredraft.drafters.registry import parse_config, resolve_method
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from tests.support import tiny_models


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Path]:
    folder = tmp_path_factory.mktemp("pair")
    tiny_models.draft().save_pretrained(folder / "draft")
    return tiny_models.plain(), folder / "draft"


def test_the_folder_tells_the_method_as_on_the_command_line(pair: tuple[LLM, Path]) -> None:
    llm, folder = pair
    for place in (folder, str(folder)):
        drafting = llm.with_drafter({"model": place, "num_speculative_tokens": 3})  # type: ignore[dict-item]
        assert drafting.drafter_name == "draft_model"


def test_a_loaded_model_drafts_as_its_folder_does(pair: tuple[LLM, Path]) -> None:
    llm, folder = pair
    sampling = Sampling(max_tokens=12, temperature=0)
    loaded = llm.with_drafter({"method": "draft_model", "model": tiny_models.draft(), "num_speculative_tokens": 3})
    stored = llm.with_drafter({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3})
    [one], [other] = (each.generate([[5, 6, 7]], sampling) for each in (loaded, stored))
    assert one.token_ids == other.token_ids
    assert one.stats.num_drafted == other.stats.num_drafted > 0


@pytest.mark.parametrize(
    ("spec", "said"),
    [({}, "needs its method beside it"), ({"method": "ngram"}, "takes a folder or hub id as its model")],
)
def test_a_loaded_model_that_no_method_can_use_is_one_line(pair: tuple[LLM, Path], spec: object, said: str) -> None:
    with pytest.raises(ForedraftError, match=said) as caught:
        pair[0].with_drafter(spec | {"model": tiny_models.draft()})  # type: ignore[operator]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("n-gram", "did you mean 'ngram'"),
        ({"method": "ngram", "num_speculativ_tokens": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "draft_model", "modle": "x"}, "did you mean 'model'"),
        ({"metod": "ngram"}, "names no method; .*; did you mean 'method'"),
        ({"modle": "x"}, "names no method; .*; did you mean 'model'"),
        ({"num_speculative_tokens": 3}, "names no method; give 'method', or a 'model' whose folder determines it$"),
        ({"method": 5}, "unknown method 5; give its name"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest(spec: object, said: str) -> None:
    with pytest.raises(ForedraftError, match=said):
        tiny_models.plain().with_drafter(spec)  # type: ignore[arg-type]


def test_every_key_is_listed_those_of_all_drafters_too() -> None:
    with pytest.raises(ValueError, match="unknown drafter option 'colour'") as caught:
        parse_config(resolve_method("draft_model")[0], {"colour": 1})
    listed = str(caught.value).partition("takes: ")[2].split(", ")
    assert {"method", "model", "num_speculative_tokens", "quantization", "top_k"} <= set(listed)
    with pytest.raises(ValueError, match="unknown drafter option 'colour'") as caught:
        parse_config(resolve_method("ngram")[0], {"colour": 1})
    assert "model" not in str(caught.value).partition("takes: ")[2].split(", ")


def make_target(num_layers: int) -> HFModel:
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers, num_attention_heads=4
    )
    torch.manual_seed(0)
    return HFModel.wrap_model(hf.LlamaForCausalLM(config), f"{num_layers}-layers")


@pytest.mark.parametrize(
    ("num_layers", "taps"), [(2, (1,)), (3, (1, 2)), (4, (1, 2, 3)), (6, (1, 3, 5)), (7, (2, 3, 4))]
)
def test_eagle3_reads_different_layers_of_a_shallow_target(num_layers: int, taps: tuple[int, ...]) -> None:
    assert create_trainee(TrainConfig(), make_target(num_layers)).spec.hidden_layers == taps


def test_wrong_taps_are_answered_with_the_spelling_of_right_ones() -> None:
    with pytest.raises(ForedraftError, match=r"--set taps=1,3,5\); got \(2, 3, 3\)"):
        create_trainee(TrainConfig(taps=(2, 3, 3)), make_target(6))
    with pytest.raises(ForedraftError, match="has 1 layer, and EAGLE-3 reads states between layers"):
        create_trainee(TrainConfig(), make_target(1))
