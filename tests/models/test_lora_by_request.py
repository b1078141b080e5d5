"""LoRA adapters that requests name: one model in memory, adapters and none of them in one batch and in one pass."""

import copy
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.small_families import make_model
from foredraft import LLM, Completion, ForedraftError, RequestOptions, Sampling, zoo
from foredraft.llm import MemoryLimits
from foredraft.models.native import family as native_family
from foredraft.sampling.grammar import Grammar
from tests.models.test_native_families import CONFIGS, make_original
from tests.support import tiny_models, tiny_seq2seq
from tests.support.families import FAMILIES, make_family
from tests.support.library_setups import EACH_SET, NATIVE, THREAD_SETUPS, use_library
from tests.support.lora_folders import merge_adapter, write_adapter

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is missing")
PROMPTS = [[5, 9, 12, 40], [7, 8, 9, 7, 8, 9, 7, 8], [(7 * i) % 31 + 4 for i in range(70)], [11, 12, 13]]
NAMES = ["one", None, "two", "one"]  # adapters of the prompts
GREEDY = Sampling(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1)
SAMPLED = Sampling(temperature=0.8, seed=4, max_tokens=20, ignore_eos=True, logprobs=2)
FORMS = {
    "native, fp32": {"fused": True, "dtype": torch.float32},
    "native, bf16": {"fused": True, "dtype": torch.bfloat16},
    "int8": {"fused": True, "dtype": torch.bfloat16, "quantization": "int8"},
    "int4": {"fused": True, "dtype": torch.bfloat16, "quantization": "int4"},
    "int8 keys": {"fused": True, "dtype": torch.bfloat16, "kv_dtype": "int8"},
    "torch": {"fused": False, "dtype": torch.float64},
}
EACH_FORM = pytest.mark.parametrize("form", [pytest.param(form, marks=NATIVE) for form in FORMS])


def make_base(dtype: torch.dtype) -> Any:
    return tiny_models.llama(hidden=64).to(dtype)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Adapters of different ranks for different modules."""
    folder, model = tmp_path_factory.mktemp("adapters"), make_base(torch.float32)
    return {
        "one": write_adapter(folder / "one", model, rank=4, seed=1),
        "two": write_adapter(folder / "two", model, ["q_proj", "v_proj", "down_proj"], rank=7, seed=2),
    }


def make_llm(form: str, folders: dict[str, Path], drafter: Any = None, **more: Any) -> LLM:
    options = dict(FORMS[form])
    model = make_base(options.pop("dtype"))
    return LLM(model, drafter, adapters=folders, is_debug=True, **options, **more)


def generate(llm: LLM, prompts: Sequence[Any], names: Sequence[str | None], sampling: Sampling) -> list[Completion]:
    return llm.generate(list(prompts), sampling, options=[RequestOptions(adapter=name) for name in names])


def list_results(completions: list[Completion]) -> list[Any]:
    """List all that a user gets for a request, log-probabilities to the last bit included."""
    return [(c.token_ids, c.finish_reason, c.logprobs, c.prompt_logprobs) for c in completions]


def list_raw(completion: Completion) -> torch.Tensor:
    """List the log-probabilities of a prompt."""
    found = completion.prompt_logprobs or []
    return torch.tensor([entry.raw_logprob for entry in found if entry is not None])


class TestOutputs:
    # int4 rounds merged weights by more than an adapter changes them
    @pytest.mark.parametrize("form", [pytest.param(form, marks=NATIVE) for form in FORMS if form != "int4"])
    def test_an_adapter_gives_the_probabilities_of_the_merged_model(self, form, folders):
        llm = make_llm(form, folders)
        options = dict(FORMS[form])
        model = make_base(options.pop("dtype"))
        merged = LLM(merge_adapter(model, folders["two"]), None, **options)
        limit = {"native, fp32": 1e-3, "torch": 1e-9}.get(form, 0.5)  # the others round the merged weights
        for prompt in PROMPTS[1:3]:
            own, other = generate(llm, [prompt], ["two"], GREEDY)[0], merged.generate([prompt], GREEDY)[0]
            plain = generate(llm, [prompt], [None], GREEDY)[0]
            assert (list_raw(own) - list_raw(other)).abs().max() < limit
            assert (list_raw(own) - list_raw(plain)).abs().max() > 1
            if limit < 0.1:
                assert own.token_ids == other.token_ids

    @needs_peft
    @pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
    @pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
    @pytest.mark.parametrize("fused", [pytest.param(True, marks=NATIVE), False], ids=["native", "torch"])
    def test_the_greedy_text_is_that_of_the_model_that_peft_merges(self, family, fused, tmp_path):
        from peft import LoraConfig, PeftModel, get_peft_model

        config = CONFIGS["mixtral"]() if family == "mixtral" else FAMILIES[family]()
        config.update({"hidden_size": 64, "head_dim": 16, "eos_token_id": None})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        of_mlp = {} if family == "mixtral" else {"down_proj": 5}  # its experts are no modules
        lora = LoraConfig(
            r=4, lora_alpha=6, target_modules=["q_proj", "k_proj", "o_proj", *of_mlp], use_rslora=True,
            rank_pattern={"layers.1.self_attn.q_proj": 3} | of_mlp, alpha_pattern={"o_proj": 9},
        )  # fmt: skip
        adapted = get_peft_model(copy.deepcopy(model), lora)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(tmp_path)
        merged = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).merge_and_unload()
        llm = LLM(model, "ngram", fused=fused, adapters={"x": tmp_path})
        assert llm.target.runs_native == fused
        for prompt in PROMPTS[:2]:
            ids = merged.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, pad_token_id=0)
            found = generate(llm, [prompt], ["x"], Sampling(temperature=0, max_tokens=20))[0]
            assert found.token_ids == ids[0, len(prompt) :].tolist()

    @NATIVE
    @pytest.mark.parametrize(
        "name", [n for n, config in CONFIGS.items() if not native_family.FAMILIES[config().model_type].mixer]
    )
    def test_every_native_family_takes_adapters(self, name, tmp_path):
        """Joined, interleaved and permuted matrices, layers with a norm after them, and experts."""
        model = make_original(name, torch.float32)
        folder = write_adapter(tmp_path, model, rank=3)
        llm = LLM(copy.deepcopy(model), None, fused=True, adapters={"x": folder})
        merged = LLM(merge_adapter(model, folder), None, fused=True)
        assert llm.target.runs_native
        own, other = generate(llm, [PROMPTS[1]], ["x"], GREEDY)[0], merged.generate([PROMPTS[1]], GREEDY)[0]
        plain = generate(llm, [PROMPTS[1]], [None], GREEDY)[0]
        assert (list_raw(own) - list_raw(other)).abs().max() < 2e-3
        assert (list_raw(own) - list_raw(plain)).abs().max() > 1e-2

    @pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "starcoder2"])
    def test_models_without_native_code_take_adapters(self, family, tmp_path):
        model = make_family(family, torch.float64)[0]
        names = ["c_attn", "c_fc", "query_key_value", "dense_4h_to_h", "q_proj", "c_proj"]
        folder = write_adapter(tmp_path, model, names, rank=3, fan_in_fan_out=family == "gpt2")
        llm = LLM(copy.deepcopy(model), "ngram", adapters={"x": folder})
        merged = LLM(merge_adapter(model, folder), None)
        own, other = generate(llm, PROMPTS[:2], ["x", "x"], GREEDY), merged.generate(PROMPTS[:2], GREEDY)
        assert [c.token_ids for c in own] == [c.token_ids for c in other]
        assert own[0].token_ids != generate(llm, PROMPTS[:1], [None], GREEDY)[0].token_ids

    def test_packed_modules_of_a_folder_take_adapters(self, tmp_path):
        model = make_family("gpt2", torch.float32)[0]
        model.save_pretrained(tmp_path / "base")
        folder = write_adapter(tmp_path / "adapter", model, ["c_attn", "c_fc"], rank=3)
        llm = LLM(str(tmp_path / "base"), "ngram", adapters={"x": folder})
        merged = LLM(merge_adapter(model, folder), None)
        sampling = Sampling(temperature=0, max_tokens=16, ignore_eos=True)
        own, other = generate(llm, PROMPTS[:2], ["x", "x"], sampling), merged.generate(PROMPTS[:2], sampling)
        assert [c.token_ids for c in own] == [c.token_ids for c in other]


class TestBatches:
    @EACH_FORM
    @pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_requests_of_a_batch_have_the_bits_that_they_have_alone(self, form, sampling, folders):
        llm = make_llm(form, folders)
        alone = [generate(llm, [p], [n], sampling)[0] for p, n in zip(PROMPTS, NAMES, strict=True)]
        together = generate(llm, PROMPTS, NAMES, sampling)
        if form == "torch":  # no promise of equal bits there; float64 has no near ties
            assert [c.token_ids for c in together] == [c.token_ids for c in alone]
        else:
            assert list_results(together) == list_results(alone)

    @EACH_FORM
    @pytest.mark.parametrize("drafter", ["ngram", "early_exit", "draft_model"])
    def test_drafts_change_nothing(self, form, drafter, folders, tmp_path):
        expected = generate(make_llm(form, folders), PROMPTS, NAMES, GREEDY)
        spec: Any = {"method": drafter} | ({"exit_layer": 1} if drafter == "early_exit" else {})
        if drafter == "draft_model":  # of the base, with which it mostly agrees
            spec["model"] = str(tmp_path)
            tiny_models.perturb(tiny_models.llama(hidden=64), 0.02).to(FORMS[form]["dtype"]).save_pretrained(tmp_path)
        llm = make_llm(form, folders, spec, num_speculative_tokens=3)
        found = generate(llm, PROMPTS, NAMES, GREEDY)
        if form == "torch":
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        else:
            assert list_results(found) == list_results(expected)
        assert sum(c.stats.num_drafted for c in found) > 0
        assert sum(c.stats.num_accepted for c in found) > 0

    @NATIVE
    @EACH_SET
    def test_bits_are_independent_on_every_instruction_set(self, instruction_set, folders):
        for setup in THREAD_SETUPS[:2]:
            with use_library(instruction_set, setup):
                llm = make_llm("native, bf16", folders)
                alone = [generate(llm, [p], [n], GREEDY)[0] for p, n in zip(PROMPTS, NAMES, strict=True)]
                assert list_results(generate(llm, PROMPTS, NAMES, GREEDY)) == list_results(alone)

    @EACH_FORM
    def test_requests_without_an_adapter_have_the_bits_of_the_model_alone(self, form, folders):
        llm = make_llm(form, folders)
        plain = make_llm(form, {}).generate(PROMPTS[1], GREEDY)
        assert list_results(generate(llm, [PROMPTS[1]], [None], GREEDY)) == list_results(plain)
        mixed = generate(llm, [PROMPTS[1], PROMPTS[0]], [None, "one"], GREEDY)
        if form != "torch":
            assert list_results(mixed)[:1] == list_results(plain)

    @EACH_FORM
    def test_samples_share_the_adapter_of_their_prompt(self, form, folders):
        llm = make_llm(form, folders, "ngram")
        options = RequestOptions(adapter="one")
        sampling = Sampling(temperature=1.0, seed=1, n=3, max_tokens=12, ignore_eos=True)
        done = llm.generate([PROMPTS[0]], sampling, options=options)
        assert len({tuple(c.token_ids) for c in done}) > 1
        first = llm.generate(
            [PROMPTS[0]], Sampling(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True), options=options
        )
        assert done[0].token_ids == first[0].token_ids

    @NATIVE
    def test_preemption_changes_nothing(self, folders):
        expected = list_results(generate(make_llm("native, bf16", folders), PROMPTS, NAMES, GREEDY))
        limits = MemoryLimits(kv_tokens=108, page_size=4, max_batch=8, max_step_tokens=48)
        llm = tiny_models.limit_memory(make_llm("native, bf16", folders), "ngram", limits, max_chunk=5)
        assert list_results(generate(llm, PROMPTS * 2, NAMES * 2, GREEDY)) == expected * 2
        assert llm.engine.scheduler.num_preempted > 0


def run(llm: LLM, prompt: list[int], name: str | None) -> tuple[list[int], int]:
    """Generate, and return the tokens and the number of prompt tokens that the prefix cache had."""
    [transcript] = llm.prepare(prompt, SAMPLED, RequestOptions(adapter=name))
    llm.engine.add(transcript)
    while llm.engine.has_work:
        llm.engine.step()
    return list(transcript.request.output), transcript.request.num_cached_tokens or 0


class TestPrefixCache:
    @NATIVE
    def test_pages_of_an_adapter_are_its_own(self, folders):
        llm, prompt = make_llm("native, fp32", folders), PROMPTS[2]
        every = (None, "one", "two")
        expected = [run(make_llm("native, fp32", folders), prompt, name)[0] for name in every]
        assert [run(llm, prompt, name) for name in every] == [(tokens, 0) for tokens in expected]
        assert [run(llm, prompt, name) for name in every] == [(tokens, 64) for tokens in expected]

    @NATIVE
    def test_an_adapter_that_replaces_another_of_its_name_finds_none_of_its_pages(self, folders):
        llm, prompt = make_llm("native, fp32", {"x": folders["one"]}), PROMPTS[2]
        run(llm, prompt, "x")
        llm.remove_adapter("x")
        llm.add_adapter("x", folders["two"])
        assert run(llm, prompt, "x") == run(make_llm("native, fp32", folders), prompt, "two")


class TestDrafters:
    @NATIVE
    @pytest.mark.parametrize("method", ["eagle3", "medusa", "mlp_speculator"])
    def test_a_head_of_the_base_drafts_for_an_adapter(self, method, tmp_path):
        folder = Path(str(zoo.find_target_folder(zoo.DEFAULT_TARGET)))
        model = AutoModelForCausalLM.from_pretrained(folder)
        adapter = write_adapter(tmp_path, model, ["v_proj", "up_proj"], rank=4, std=0.02)
        prompts, names = ["def f(n):", "import os", "class A:"], ["x", None, "x"]
        sampling = Sampling(temperature=0, max_tokens=24)
        plain = LLM(drafter=None, adapters={"x": adapter})
        drafted = plain.with_drafter({"method": method, "num_speculative_tokens": 3})
        expected, found = (generate(llm, prompts, names, sampling) for llm in (plain, drafted))
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        assert expected[0].token_ids != generate(plain, prompts[:1], [None], sampling)[0].token_ids
        assert all(c.stats.num_accepted > 0 for c in found)


class TestGrammars:
    @NATIVE
    def test_an_adapter_keeps_to_the_grammar_of_its_request(self, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(str(zoo.find_target_folder(zoo.DEFAULT_TARGET)))
        adapter = write_adapter(tmp_path, model, ["v_proj", "up_proj"], rank=4, std=0.02)
        plain = LLM(drafter=None, adapters={"x": adapter})
        sampling = Sampling(temperature=0, max_tokens=24, grammar=Grammar.regex("[a-f]{3,9}=[0-9]{2,6};"))
        prompts, names = ["x = ", "value: "], ["x", None]
        expected, found = (
            generate(llm, prompts, names, sampling) for llm in (plain, plain.with_drafter("draft_model"))
        )
        assert [c.text for c in found] == [c.text for c in expected]
        assert all(re.fullmatch("[a-f]{3,9}=[0-9]{2,6};", c.text) for c in found)


class TestNames:
    @NATIVE
    def test_adapters_come_and_go(self, folders):
        llm = make_llm("native, fp32", {})
        assert llm.adapter_names == ()
        with pytest.raises(ForedraftError, match=r"there is no adapter 'one'; add it first"):
            generate(llm, [PROMPTS[0]], ["one"], GREEDY)
        llm.add_adapter("one", folders["one"])
        stream = llm.stream([PROMPTS[0]], GREEDY, options=RequestOptions(adapter="one"))
        next(stream)
        llm.remove_adapter("one")
        assert [delta.completion for delta in stream][-1] is not None  # a running request keeps its adapter
        llm.add_adapter("two", folders["two"])
        assert llm.adapter_names == llm.with_drafter("ngram").adapter_names == ("two",)
        with pytest.raises(ForedraftError, match=r"there is no adapter 'one'; use one of: two"):
            generate(llm, [PROMPTS[0]], ["one"], GREEDY)

    def test_names_that_are_taken_or_none_are_refused(self, folders):
        llm = make_llm("torch", {"one": folders["one"]})
        with pytest.raises(ForedraftError, match="exists; remove it first"):
            llm.add_adapter("one", folders["two"])
        with pytest.raises(ForedraftError, match="the name of an adapter is a text"):
            llm.add_adapter(" ", folders["two"])
        with pytest.raises(ForedraftError, match="there is no adapter 'x'"):
            llm.remove_adapter("x")
        with pytest.raises(ForedraftError, match="takes a dict from names to folders"):
            LLM(make_base(torch.float32), None, adapters=["x"])
        with pytest.raises(ForedraftError, match="adapter is the name of an adapter or None"):
            RequestOptions(adapter=3)


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"use_dora": True}, r"has DoRA \(use_dora\), which a request cannot have of its own; merge it"),
            ({"bias": "lora_only"}, r"has biases of the model \(bias='lora_only'\)"),
            ({"modules_to_save": ["lm_head"]}, r"has whole modules \(modules_to_save\)"),
            ({"lora_bias": True}, r"has biases of its own \(lora_bias\)"),
            ({"target_parameters": ["experts.down_proj"]}, "such as those of experts"),
            ({"future_option": 1}, "has the option future_option"),
            ({"init_lora_weights": "pissa_niter_4"}, "changes the weights of the model too"),
            ({"r": 0}, "has a wrong or missing field"),
            ({"r": 3}, r"q_proj has matrices of \[4, 64\] and \[64, 4\], and needs \[3, 64\]"),
            ({"target_modules": None}, "has no target_modules"),
            ({"target_modules": ["c_attn"]}, "no linear layer matches its target_modules"),
            ({"target_modules": ["q_proj", "k_proj"]}, r"lacks weights that its adapter_config\.json names"),
            ({"target_modules": ["q_proj", "lm_head"]}, "changes the output matrix lm_head"),
            ({"layers_to_transform": [0]}, r"has weights such as base_model\.model\.model\.layers\.1"),
            ({"peft_type": "IA3"}, "only LORA is served"),
        ],
    )
    def test_an_adapter_that_is_more_than_its_matrices_is_refused_by_name(self, config, words, tmp_path):
        folder = write_adapter(tmp_path, make_base(torch.float32), ["q_proj"], **config)
        if "target_modules" not in config:
            content = json.loads((folder / "adapter_config.json").read_text())
            (folder / "adapter_config.json").write_text(json.dumps(content | {"target_modules": ["q_proj"]}))
        with pytest.raises(ForedraftError, match=words):
            make_llm("torch", {"x": folder})

    def test_damaged_weights_are_refused(self, tmp_path):
        folder = write_adapter(tmp_path, make_base(torch.float32), ["q_proj"])
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        name = next(iter(tensors))
        save_file(tensors | {name: torch.full_like(tensors[name], torch.nan)}, file)
        with pytest.raises(ForedraftError, match="NaN or infinite"):
            make_llm("torch", {"x": folder})
        file.write_bytes(b"no tensors")
        with pytest.raises(ForedraftError, match="cannot be read"):
            make_llm("torch", {"x": folder})

    def test_models_that_take_no_adapters_say_why(self, folders, tmp_path):
        tiny_seq2seq.make_model("t5").save_pretrained(tmp_path)
        with pytest.raises(ForedraftError, match="cannot have adapters, because it has an encoder; merge the adapter"):
            LLM(str(tmp_path), None, adapters=folders)

    @pytest.mark.parametrize(
        ("family", "words"),
        [
            ("mamba2", "its recurrent layers read the rows"),
            ("bloom", "it computes attention in code of its own"),
            ("openai-gpt", "it computes the tokens of several requests again"),
        ],
    )
    def test_models_whose_rows_lose_their_requests_say_why(self, family, words, folders):
        with pytest.raises(ForedraftError, match=f"cannot have adapters, because {words}.*; merge the adapter"):
            LLM(make_model(family), None, adapters=folders)

    @NATIVE
    def test_native_code_names_a_module_that_it_cannot_change(self, tmp_path):
        model = make_base(torch.float32)
        model.extra = nn.Linear(8, 8)
        folder = write_adapter(tmp_path, model, ["q_proj", "extra"])
        with pytest.raises(ForedraftError, match="cannot change extra for single requests; leave that module out"):
            LLM(model, None, fused=True, adapters={"x": folder})


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"target_modules": "all-linear"}, 14),
        ({"target_modules": r".*\.self_attn\.[qv]_proj"}, 4),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, 1),
        ({"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]}, 2),
        ({"target_modules": ["model.layers.0.mlp.up_proj"]}, 1),
    ],
)
def test_modules_are_chosen_as_by_peft(config, count, tmp_path):
    model = make_base(torch.float32)
    folder = write_adapter(tmp_path, model, **config)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    chosen = _choose_by_peft(model, config)
    assert len(chosen) == count
    save_file(
        {name: tensors[name] for name in tensors if name.split(".lora_")[0][len("base_model.model.") :] in chosen}, file
    )
    llm = make_llm("torch", {"x": folder})
    assert set(llm.target.adapters.find("x").modules) == chosen


def _choose_by_peft(model: Any, config: dict[str, Any]) -> set[str]:
    """Choose modules by PEFT itself."""
    pytest.importorskip("peft")
    from peft import LoraConfig, inject_adapter_in_model

    adapted = inject_adapter_in_model(LoraConfig(r=2, **config), copy.deepcopy(model))
    return {name.split(".lora_A")[0] for name, _ in adapted.named_modules() if ".lora_A" in name}


def test_a_step_that_runs_before_an_adapter_is_added_goes_on(folders):
    """Hooks of modules are installed while requests run."""
    llm = make_llm("torch", {}, limits=MemoryLimits(max_batch=4))
    stream = llm.stream([PROMPTS[0]], SAMPLED)
    next(stream)
    llm.add_adapter("one", folders["one"])
    rest = [delta.completion for delta in stream][-1]
    assert rest is not None
    assert rest.token_ids == make_llm("torch", {}).generate([PROMPTS[0]], SAMPLED)[0].token_ids
