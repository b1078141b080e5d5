"""The drafter of a deployment in another engine."""

import json

import pytest

from foredraft import zoo
from foredraft.draft_length.length_table import LengthTable
from foredraft.drafters.checkpoint_folders import recognise
from foredraft.errors import ForedraftError
from foredraft.handover.deployment import Deployment
from foredraft.handover.drafter_plan import HandoverChoices, plan_drafter
from foredraft.handover.engines.llama_cpp import prepare
from foredraft.handover.registry import load_engines
from foredraft.verification.rules import BLOCK, MATCH
from foredraft.vllm.settings import SETTINGS_VARIABLE

TARGET = str(zoo.find_folder("target"))
NATIVE = HandoverChoices(has_foredraft=False)


def plan(engine, method, choices=None, **fields):
    deployment = Deployment(target=TARGET, method=method, **fields)
    return plan_drafter(deployment, load_engines()[engine], choices or HandoverChoices())


def read_vllm(planned):
    flag, text = planned.arguments.flags
    assert flag == "--speculative-config"
    return json.loads(text)


def test_a_drafter_of_tokens_runs_as_itself_inside_vllm():
    planned = plan("vllm", "suffix", lengths=LengthTable.parse(16), drafter_options={"store_outputs": 100})
    assert read_vllm(planned) == {
        "method": "custom_class",
        "model": "foredraft.vllm.Proposer",
        "num_speculative_tokens": 16,
    }
    assert json.loads(planned.environment[SETTINGS_VARIABLE]) == {"method": "suffix", "store_outputs": 100}
    assert planned.needs_foredraft
    assert planned.notes == ()


def test_its_table_travels_with_it():
    table = str(zoo.find_folder("ngram"))
    planned = plan("vllm", "ngram_lm", model=table, lengths=LengthTable.parse(8))
    assert json.loads(planned.environment[SETTINGS_VARIABLE])["model"] == table
    assert planned.folders == (table,)


def test_without_foredraft_the_engine_drafts_by_itself_and_the_difference_is_said():
    planned = plan(
        "vllm", "suffix", NATIVE, lengths=LengthTable.parse(16), drafter_options={"min_confidence": 0.2, "min_match": 2}
    )
    assert read_vllm(planned) == {
        "method": "suffix",
        "num_speculative_tokens": 16,
        "suffix_decoding_min_token_prob": 0.2,
    }
    assert any("arctic-inference" in note for note in planned.notes)
    assert any("suffix.min_match=2: no equal" in note for note in planned.notes)
    assert not planned.needs_foredraft


def test_a_head_is_exported_for_the_engine(tmp_path):
    planned = plan(
        "vllm", "eagle", HandoverChoices(tmp_path), model=str(zoo.find_folder("eagle")), lengths=LengthTable.parse(4)
    )
    folder = str(tmp_path / "drafter")
    assert read_vllm(planned)["model"] == folder
    assert read_vllm(planned)["method"] == "eagle"
    assert planned.folders == (folder,)
    assert recognise(folder)[0] == "eagle"


def test_a_head_needs_a_folder_to_be_exported_to():
    with pytest.raises(ForedraftError, match="give --out FOLDER"):
        plan("vllm", "eagle", model=str(zoo.find_folder("eagle")))


def test_a_draft_model_is_loaded_as_it_is():
    draft = str(zoo.find_folder("draft"))
    planned = plan(
        "sglang",
        "draft_model",
        model=draft,
        lengths=LengthTable.parse(5),
        drafter_options={"top_k": 2, "tree_nodes": 12},
    )
    assert planned.arguments.flags == (
        *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft),
        *("--speculative-num-steps", "5", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "13"),
    )
    config = plan("trtllm", "draft_model", model=draft, lengths=LengthTable.parse(5)).arguments.config
    assert config["speculative_config"] == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 5,
        "speculative_model": draft,
    }


def test_another_vocabulary_is_translated_or_refused():
    draft = str(zoo.find_folder("draft"))
    planned = plan("vllm", "draft_model", model=draft, drafter_options={"vocab": "tli"})
    assert read_vllm(planned)["use_heterogeneous_vocab"] is True
    assert read_vllm(planned)["draft_sample_method"] == "greedy"
    with pytest.raises(ForedraftError, match="give tli"):
        plan("vllm", "draft_model", model=draft, drafter_options={"vocab": "slem"})


def test_llama_cpp_drafts_with_several_methods_after_a_conversion():
    draft = str(zoo.find_folder("draft"))
    planned = plan(
        "llama.cpp",
        "ngram+draft_model",
        model=draft,
        lengths=LengthTable.parse(6),
        drafter_options={"ngram.prompt_lookup_max": 3, "branches": 2},
    )
    flags = planned.arguments.flags
    assert flags[:2] == ("--spec-type", "ngram-simple,draft-simple")
    assert flags[flags.index("--spec-ngram-simple-size-n") + 1] == "3"
    assert flags[flags.index("--spec-draft-n-max") + 1] == "6"
    assert [command.split()[2] for command in planned.preparations] == [TARGET, draft]
    assert planned.target == flags[flags.index("--spec-draft-model") + 1].replace("drafter.gguf", "target.gguf")
    assert any("ngram.branches=2: no equal" in note for note in planned.notes)


def test_llama_cpp_takes_a_gguf_file_as_it_is():
    prepared = prepare("/models/x.Q8_0.gguf", None, False, "/out")
    assert (prepared.commands, prepared.target) == ((), "/models/x.Q8_0.gguf")
    with pytest.raises(ForedraftError, match="a head is converted with the folder of its target"):
        prepare("/models/x.Q8_0.gguf", "/models/head", True, "/out")


@pytest.mark.parametrize(
    ("engine", "method", "message"),
    [
        ("vllm", "hydra", "vLLM loads no Hydra heads; the nearest is an EAGLE-3 head"),
        ("sglang", "medusa", "SGLang loads no Medusa heads; the nearest"),
        ("trtllm", "eagle", "TensorRT-LLM has no equal of the method eagle; the nearest"),
        ("llama.cpp", "lookahead", "llama.cpp has no equal of the method lookahead; the nearest"),
        ("sglang", "ngram_lm", "SGLang has no equal of the method ngram_lm"),
        ("vllm", "ngram+draft_model", "vLLM drafts with one method, not with ngram.draft_model; give one of them"),
        ("vllm", "auto", "auto chooses its methods when it starts"),
        ("vllm", "draft_model", "drafts with a model; give --spec-model"),
        ("vllm", "ngrm", "did you mean"),
    ],
)
def test_what_cannot_be_handed_over_is_one_line_with_the_nearest(engine, method, message):
    with pytest.raises(ForedraftError, match=message) as caught:
        plan(engine, method)
    assert "\n" not in str(caught.value)


def test_a_wrong_option_is_an_error():
    with pytest.raises(ForedraftError, match="unknown drafter option 'branchs'"):
        plan("vllm", "ngram", drafter_options={"branchs": 2})


def test_the_verification_rule_is_set_or_said():
    draft = str(zoo.find_folder("draft"))
    assert read_vllm(plan("vllm", "draft_model", model=draft, rule=BLOCK))["rejection_sample_method"] == BLOCK.vllm_name
    assert any(
        "--verify match: no equal" in note for note in plan("vllm", "draft_model", model=draft, rule=MATCH).notes
    )
    assert any("--verify block: no equal" in note for note in plan("sglang", "ngram", rule=BLOCK).notes)


def test_a_measured_draft_length_becomes_a_fixed_one():
    assert any("--spec-tokens auto" in note for note in plan("sglang", "ngram").notes)
    assert not any("--spec-tokens auto" in note for note in plan("sglang", "ngram", lengths=LengthTable.parse(4)).notes)


def test_plain_decoding_needs_no_drafter():
    planned = plan("vllm", None)
    assert planned.arguments.flags == ()
    assert plan("llama.cpp", None).preparations


def test_a_table_by_batch_size_becomes_vllms_and_the_longest_draft_elsewhere():
    given = {"model": str(zoo.find_folder("draft")), "lengths": LengthTable.parse("1:6,4:0-4,16:0")}
    planned = plan("vllm", "draft_model", **given)
    config = read_vllm(planned)
    assert config["num_speculative_tokens"] == 6
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 3, 6], [4, 15, 4], [16, 16, 0]]
    assert any("--spec-tokens 1:6,4:0-4,16:0" in note for note in planned.notes)
    fixed = given | {"lengths": LengthTable.parse("1:6,4:2")}
    assert plan("vllm", "draft_model", **fixed).notes == ()
    assert any("--spec-tokens 1:6,4:2: SGLang" in note for note in plan("sglang", "draft_model", **fixed).notes)
