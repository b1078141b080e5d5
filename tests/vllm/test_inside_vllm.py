"""vLLM itself with exported drafters and with the proposer, on the built-in models in float32.

Every case loads an engine in a process of its own and takes about a minute.
"""

import json
from dataclasses import replace
from functools import cache

import pytest
from safetensors.torch import load_file

from foredraft import LLM, Sampling, zoo
from foredraft.checkpoints.target import read_target
from foredraft.drafters import checkpoint_folders
from foredraft.drafters.registry import load_methods
from foredraft.handover.registry import load_engines
from foredraft.vllm.settings import SETTINGS_VARIABLE
from tests.support.vllm_process import needs_vllm, run_vllm

pytestmark = needs_vllm
TARGET = str(zoo.find_folder("target"))
PROMPTS = (
    "class TestQueue(unittest.TestCase):",
    "def fibonacci(n):\n",
    "import os\n\ndef main():\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n",
    "The quick brown fox",
    'def parse(text):\n    """',
    "    def setUp(self):\n",
    "class Queue:\n    def __init__(self",
)
NUM_TOKENS, DRAFT_TOKENS, TOLERANCE = 64, 3, 0.05
PROPOSER = {"method": "custom_class", "model": "foredraft.vllm.Proposer"}
# Formats that an engine reads, by method; the folder of a built-in drafter each.
FORMATS = [
    (name, entry.name)
    for name, method in load_methods().items()
    if method.checkpoint is not None and "vllm" in method.counterparts
    for entry in method.checkpoint.exports
    if entry.make_command is not None and entry.name != "sglang"
]
SUFFIX = {"method": "suffix", "store_outputs": 100}
TABLE = {"method": "ngram_lm", "model": str(zoo.find_folder("ngram"))}
# Settings inside vLLM, and those here that accept as much. An ensemble here drafts by measured times, so its first
# member stands for it.
TEXT_METHODS = [(SUFFIX, SUFFIX), (TABLE, TABLE), ({"method": "ngram+suffix"}, {"method": "ngram"})]


@cache
def encode_prompts():
    with LLM("builtin", None) as llm:
        return [llm.tokenizer.encode(prompt) for prompt in PROMPTS]


@cache
def decode_plainly():
    return run_vllm(make_job(None))["texts"][0]


def make_job(spec, calls=1):
    return {
        "model": TARGET,
        "speculative_config": spec,
        "prompts": encode_prompts(),
        "max_tokens": NUM_TOKENS,
        "calls": calls,
    }


def draft_here(spec, calls=1):
    """Return the texts of the last call here, and the accepted tokens per draft of all calls."""
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with LLM("builtin", spec, dtype="float32") as llm:
        done = [llm.generate(encode_prompts(), sampling) for _ in range(calls)]
    stats = [completion.stats for call in done for completion in call]
    accepted = sum(one.num_accepted for one in stats) / sum(one.num_drafts for one in stats)
    return [list(completion.token_ids) for completion in done[-1]], accepted


def accept_there(result):
    return result["counters"]["num_accepted_tokens"] / result["counters"]["num_drafts"]


def check(result, texts, accepted):
    """Check a run of vLLM: its texts are those of plain decoding, and it accepts as much as here."""
    assert result["texts"][-1] == decode_plainly()
    assert result["texts"][-1] == texts
    assert accept_there(result) == pytest.approx(accepted, rel=TOLERANCE)


def find_head(method, tmp_path):
    """Return the folder of a built-in head; of one that uses the target's matrix, a copy with that matrix in it."""
    folder = zoo.find_drafter(load_methods()[method].built_in.folders)
    head = checkpoint_folders.read(folder, read_target(TARGET).info)
    if getattr(head.shape, "has_own_head", True):
        return folder
    matrix = load_file(zoo.find_folder("target") / "model.safetensors")["model.embed_tokens.weight"]
    own = {f"{i}.{head.shape.num_layers}.weight": matrix.clone() for i in range(head.shape.num_heads)}
    shape = replace(head.shape, has_own_head=True)
    checkpoint_folders.write(tmp_path / "own", method, shape, head.tensors | own)
    return str(tmp_path / "own")


@pytest.mark.parametrize(("method", "fmt"), FORMATS)
def test_an_exported_head_loads_and_accepts_as_much_as_here(tmp_path, method, fmt):
    folder = find_head(method, tmp_path)
    target = read_target(TARGET)
    checkpoint_folders.export(checkpoint_folders.read(folder, target.info), fmt, tmp_path / "out", target)
    spec = {"method": method, "model": str(tmp_path / "out"), "num_speculative_tokens": DRAFT_TOKENS}
    check(run_vllm(make_job(spec)), *draft_here(spec | {"model": folder}))


def test_a_draft_model_loads_and_accepts_as_much_as_here():
    spec = {"method": "draft_model", "model": str(zoo.find_folder("draft")), "num_speculative_tokens": DRAFT_TOKENS}
    check(run_vllm(make_job(spec)), *draft_here(spec))


@pytest.mark.parametrize(("settings", "here"), TEXT_METHODS, ids=lambda settings: settings["method"])
def test_the_proposers_texts_are_vllms_own_and_it_accepts_as_much_as_here(settings, here):
    result = run_vllm(
        make_job(PROPOSER | {"num_speculative_tokens": 6}, calls=2), **{SETTINGS_VARIABLE: json.dumps(settings)}
    )
    assert result["texts"] == [decode_plainly()] * 2
    texts, accepted = draft_here(here | {"num_speculative_tokens": 6}, calls=2)
    assert result["texts"][-1] == texts
    assert accept_there(result) > (1 - TOLERANCE) * accepted


def test_the_flags_of_a_handover_are_vllms():
    known = set(run_vllm("flags"))
    engine = load_engines()["vllm"]
    used = {flag.flag for flag in engine.flags.values() if flag.flag is not None}
    used |= {engine.api_key_flag, "--speculative-config", "--host", "--port"}
    assert used <= known


def test_a_wrong_setting_of_the_proposer_stops_vllm_with_the_reason():
    with pytest.raises(AssertionError, match="unknown method 'ngrm'"):
        run_vllm(make_job(PROPOSER | {"num_speculative_tokens": 4}), **{SETTINGS_VARIABLE: '{"method": "ngrm"}'})
