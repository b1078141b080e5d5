"""`foredraft serve` with several models: texts of --model and --lora, and one line for each mistake."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from foredraft.cli.model_list import COMMON_KEYS, TARGET_KEYS, NamedModel, parse_named_model
from foredraft.cli.model_sources import ADMIN_FIELDS, SourceBuilder
from foredraft.cli.serve import ServeOptions, build_settings, build_worker_limits, resolve_options, serve
from foredraft.cli.shell import UsageError
from foredraft.errors import ForedraftError
from foredraft.server.adapter_service import AdapterLoader
from foredraft.server.admin import LoadModelRequest

PAIR = ["--model", "a=builtin", "--model", "b=org/model"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "x", "--model", "y"], "--model is given 2 times; name each model: --model NAME=x"),
        (["--model", "a=x", "--model", "a=y"], "the name 'a' is given twice"),
        (["--model", "a=x,weight=0"], "--model a: weight takes a number above 0, got '0'"),
        (["--model", "a=x,weight=much"], "weight takes a number above 0"),
        (["--model", "a=x,weight=nan"], "weight takes a number above 0"),
        (["--model", "a b=x"], "'a b' is no name of a model"),
        (["--model", "a=x,size=2"], "--model a: unknown key 'size'; use one of: weight, spec-method"),
        (["--model", "a=x,y"], "'y' is not KEY=VALUE; a value cannot have a comma"),
        (["--model", "a=,weight=1"], "--model a has no path"),
        (["--model", "a=x,max-batch=many"], "--model a: Invalid value for '--max-batch'"),
        (["--model", "a=x,spec-method=guess"], "unknown method 'guess'"),
        (["x", "--model", "a=y"], "give it once"),
        ([*PAIR, "--replicas", "2"], "--replicas serves one model; leave --model NAME=PATH out"),
        ([*PAIR, "--tensor-parallel-size", "2"], "--tensor-parallel-size splits the only model"),
        ([*PAIR, "--traces"], "--traces shows the only model"),
        (["--admin-key", "k", "--replicas", "2"], "--replicas serves one model; leave --admin-key out"),
        ([*PAIR, "--served-model-name", "c"], "--served-model-name is for one model"),
        (["--admin-key", "k", "--api-key", "k"], "--admin-key equals the API key"),
        (["--admin-key", " "], "the admin key is empty"),
        (["--lora", "x"], "--lora takes NAME=FOLDER, got 'x'"),
        (["--lora", "x=/nowhere"], "/nowhere is no folder; give the folder of a LoRA adapter"),
        ([*PAIR, "--lora", "x=/nowhere"], "the adapter 'x' does not say which model it adapts; name it BASE/x"),
        (["--lora", "x=/nowhere,dtype=float32"], "--lora x: dtype is that of the base; leave it out"),
    ],
)
def test_a_mistake_is_one_line(run, args: list[str], words: str):
    done = run("serve", *args)
    assert (done.code in (1, 2), done.stdout, len(done.error_lines)) == (True, "", 1)
    assert words in done.stderr


def test_other_commands_say_what_to_do(run, tmp_path):
    (tmp_path / "in.txt").write_text("a\n")
    done = run("batch", str(tmp_path / "in.txt"), str(tmp_path / "out"), "--model", "a=x", "--model", "b=y")
    assert (done.code, "a batch has one model; give --model PATH" in done.stderr) == (2, True)
    done = run("handover", "--engine", "vllm", *PAIR)
    assert (done.code, "a handover has one model" in done.stderr) == (2, True)
    assert "foredraft serve, generate, chat and batch have --lora" in run("train", "--lora", "x").stderr


def test_a_text_with_options():
    text = "org/a=/data/x=1,weight=2.5,spec-model=m,spec-model=n,spec-option=tree_nodes=16,max_model_len=512"
    options = {"spec-model": ["m", "n"], "spec-option": ["tree_nodes=16"], "max-model-len": ["512"]}
    assert parse_named_model(text, is_adapter=False) == NamedModel(
        "org/a", "/data/x=1", False, 2.5, options, None, True
    )


def test_a_path_that_exists_is_no_name(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a=b").mkdir()
    monkeypatch.chdir(tmp_path)
    options = resolve_options(ServeOptions(models=["a=b"]))
    assert (options.model, options.models) == ("a=b", None)
    assert resolve_options(ServeOptions(model_argument="x")).model == "x"


def make_builder(*models: str, lora: list[str] | None = None, **options) -> SourceBuilder:
    resolved = resolve_options(ServeOptions(models=list(models) or None, lora=lora, **options))

    def make_loader(model_options: ServeOptions, folder: str | None) -> SimpleNamespace:
        return SimpleNamespace(load=(model_options, folder))

    return SourceBuilder(resolved, build_settings, make_loader, build_worker_limits(resolved), serve)


def make_adapter(folder: Path) -> str:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return str(folder)


def test_options_of_the_command_hold_for_every_model_except_its_drafter(tmp_path):
    folder = make_adapter(tmp_path)
    builder = make_builder(
        "a=x,weight=3,max-batch=4", "a/b=y,spec-method=ngram,chat-template=plain",
        lora=[f"a/b/fr={folder},spec-model=z", f"a/en={folder}"], spec_model=["head"], spec_tokens="4", max_batch=8,
    )  # fmt: skip
    sources = builder.build_first()
    assert [source.name for source in sources] == ["a", "a/b", "a/b/fr", "a/en"]
    assert [source.base_name for source in sources] == [None, None, "a/b", "a"]
    assert [source.weight for source in sources] == [3, 1, 1, 1]
    assert [source.shares_engine for source in sources] == [False, False, False, True]
    assert sources.pop().load.__self__ == AdapterLoader("a/en", folder)
    found = [source.load[0] for source in sources]
    assert [(o.model, o.max_batch, o.spec_model, o.spec_method, o.spec_tokens) for o in found] == [
        ("x", 4, ["head"], None, "4"),
        ("y", 8, None, ["ngram"], "auto"),
        ("y", 8, ["z"], None, "auto"),
    ]
    assert [source.load[1] for source in sources] == [None, None, folder]


def test_a_requested_model_has_no_drafter_of_the_only_one(tmp_path):
    folder = make_adapter(tmp_path)
    builder = make_builder("x", spec_model=["head"], tokenizer="t", max_batch=8)
    [first] = builder.build_first()
    assert (first.name, first.load[0].spec_model) == ("x", ["head"])
    request = LoadModelRequest(name="c", model="y", weight=2, kv_memory="1M", spec_tokens=4, spec_option=["a=1"])
    made = builder.build_requested(request, ["x"])
    options = made.load[0]
    assert (made.name, made.weight, made.kv_memory, made.base_name) == ("c", 2, 1 << 20, None)
    assert (options.model, options.spec_model, options.spec_tokens, options.tokenizer) == ("y", None, "4", "auto")
    assert (options.spec_option, options.max_batch) == (["a=1"], 8)
    adapter = builder.build_requested(LoadModelRequest(name="c/fr", lora=folder), ["x", "c"])
    assert (adapter.base_name, adapter.shares_engine) == ("c", True)
    weighted = builder.build_requested(LoadModelRequest(name="c/fr", lora=folder, weight=1), ["x", "c"])
    assert (weighted.base_name, weighted.load[0].model, weighted.load[1]) == ("c", "y", folder)
    with pytest.raises(ForedraftError, match="name it BASE/fr, with BASE one of: x, c"):
        builder.build_requested(LoadModelRequest(name="fr", lora=folder), ["x", "c"])
    with pytest.raises(UsageError, match="dtype is that of the base"):
        builder.build_requested(LoadModelRequest(name="fr", lora=folder, dtype="float32"), ["x"])


def test_a_request_takes_the_options_of_the_command_line():
    """Except files of this machine: /tokenizer_info would show them."""
    names = {name.replace("_", "-") for name in LoadModelRequest.model_fields} - {
        n.replace("_", "-") for n in ADMIN_FIELDS
    }
    assert names == {*COMMON_KEYS, *TARGET_KEYS} - {"chat-template"}
    assert {name.replace("-", "_") for name in names} <= {option.name for option in fields(ServeOptions)}
