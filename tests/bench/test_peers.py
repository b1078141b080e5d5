"""Computations in the peers' scripts that need only the standard library and numpy."""

import importlib
import json
import re
import sys
import types

import numpy as np
import pytest
import torch

from foredraft.bench.subprocess_peer import PEERS_FOLDER
from tests.support import tiny_models


@pytest.fixture
def scripts(monkeypatch):
    """Put the peers' folder on the path, as when an interpreter runs a script there."""
    monkeypatch.syspath_prepend(str(PEERS_FOLDER))
    monkeypatch.setitem(sys.modules, "gguf", types.ModuleType("gguf"))  # lives in llama.cpp's environment
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the scripts set it for good
    for name in ("serve", "gguf_from_hf", "peer_foredraft", "peer_transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return lambda name: importlib.import_module(name)


@pytest.mark.parametrize(
    ("tokens", "count", "longest", "drafted"),
    [
        ([1, 2, 3, 9, 1, 2], 2, 4, [3, 9]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, 4, [4, 1]),  # the latest occurrence
        ([7, 1, 2, 3, 5, 2, 8, 1, 2], 3, 4, [3, 5, 2]),  # the longer match, though the shorter one is later
        ([7, 1, 2, 3, 5, 2, 8, 1, 2], 3, 1, [8, 1, 2]),
        ([1, 2, 3], 4, 4, []),
        ([4, 4, 4], 2, 2, [4]),
        ([4], 2, 2, []),
        ([1, 2, 1], 0, 2, []),
    ],
)
def test_prompt_lookup(scripts, tokens, count, longest, drafted):
    assert scripts("serve").draft_by_lookup(tokens, count, longest) == drafted


def test_costs_are_medians_without_the_warm_up(scripts, monkeypatch):
    serve, undone, now = scripts("serve"), [], [0.0]
    monkeypatch.setattr(serve, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    rounds = iter([9, 9, 9, 9, 1, 2, 3, 4, 1, 9])  # (1 row, 4 rows) five times, two of them warm-up

    def verify(count):
        now[0] += next(rounds)

    costs = serve.measure_verify_costs([1, 4], 3, verify, undone.append)
    assert costs == {"seconds": {"1": 1.0, "4": 4.0}}
    assert undone == [1, 4] * 5


def test_weights_are_read_as_they_were_written(scripts, tmp_path):
    model = tiny_models.llama().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    convert = scripts("gguf_from_hf")
    tensors = dict(convert._read_tensors(tmp_path))
    assert tensors.keys() == model.state_dict().keys()
    for name, values in tensors.items():
        weight = model.state_dict()[name]
        assert np.array_equal(values, weight.float().numpy())
        assert np.array_equal(convert._to_bfloat16(values), weight.view(torch.uint16).numpy())  # and back, bit by bit
        assert convert._rename_tensor(name).endswith(".weight")


def test_rounding_to_bfloat16_is_that_of_torch(scripts):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values[:2] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])  # ties go to even
    expected = values.to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(scripts("gguf_from_hf")._to_bfloat16(values.numpy()), expected)


def test_rotation_by_neighbours_of_the_interleaved_rows_is_rotation_by_halves(scripts):
    """llama.cpp rotates rows (2i, 2i + 1) by angle i, transformers rows (i, i + d/2): the same dot products."""
    generator, heads, dim, width = np.random.default_rng(0), 3, 8, 5
    weight, x = generator.normal(size=(heads * dim, width)), generator.normal(size=width)
    angles = generator.normal(size=dim // 2)
    turned = scripts("gguf_from_hf")._interleave_rows(weight, heads)
    halves, pairs = (weight @ x).reshape(heads, 2, dim // 2), (turned @ x).reshape(heads, dim // 2, 2)
    a, b = halves[:, 0], halves[:, 1]
    by_halves = np.stack([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1)
    a, b = pairs[..., 0], pairs[..., 1]
    by_pairs = np.stack([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1)
    np.testing.assert_allclose(by_halves, by_pairs)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "qwen2"}, "only Llama models without biases"),
        ({"attention_bias": True}, "only Llama models without biases"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' are not converted"),
    ],
)
def test_what_cannot_be_converted_is_refused(scripts, change, complaint):
    config = json.loads(tiny_models.llama().config.to_json_string()) | change
    with pytest.raises(ValueError, match=complaint):
        scripts("gguf_from_hf")._check_config(config)


@pytest.mark.parametrize(
    ("script", "peer_class", "modes"),
    [
        ("peer_foredraft", "ForedraftPeer", ("plain", "ngram:3")),
        ("peer_transformers", "TransformersPeer", ("plain", "prompt_lookup", "assisted")),
    ],
)
def test_the_peers_that_are_always_here_keep_to_the_protocol(scripts, tmp_path, script, peer_class, modes):
    tiny_models.llama().float().save_pretrained(tmp_path)
    peer = getattr(scripts(script), peer_class)()
    drafters = {"ngram:3": {"method": "ngram", "num_speculative_tokens": 3}}
    peer.load(
        model=str(tmp_path), draft=str(tmp_path), dtype="float32", threads=1, drafters=drafters,
        settings={"fused": False},
    )  # fmt: skip
    answers = [
        peer.generate(mode=mode, prompt=[5, 9, 5, 9], max_tokens=8, draft_tokens=2, lookup=[3, 2]) for mode in modes
    ]
    assert len({tuple(answer["tokens"]) for answer in answers}) == 1
    assert [len(answer["tokens"]) for answer in answers] == [8] * len(modes)
    assert answers[0]["passes"] == 8
    if len(modes) == 3:
        assert answers[2]["passes"] == 3  # the target drafts for itself: two drafted tokens and one more, every time
    streams = peer.decode_streams(prompts=[[5, 9, 5, 9], [7, 7, 1, 3]], max_tokens=8)
    assert streams["tokens"][0] == answers[0]["tokens"]
    assert [len(tokens) for tokens in streams["tokens"]] == [8, 8]
    assert set(peer.verify(rows=[1, 2], context=[1] * 8, repeats=1)["seconds"]) == {"1", "2"}


def test_no_peer_but_our_own_needs_this_package():
    imports = re.compile(r"^\s*(from|import) foredraft", re.M)
    importers = {p.name for p in PEERS_FOLDER.glob("*.py") if imports.search(p.read_text())}
    assert importers == {"peer_foredraft.py"}
