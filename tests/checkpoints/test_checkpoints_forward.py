"""What a published folder computes once it is loaded: first-step and recurrent outputs are those of the formulas.

Networks run as drafters run them, over paged memory; the formulas stand in straight.py, over whole sequences.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoints import folders, straight
from checkpoints.folders import HEAD_DIM, IDS, LAYERS, H, V
from checkpoints.straight import Flags, Numbers
from foredraft.checkpoints.base import MedusaShape, SpeculatorShape
from foredraft.checkpoints.read import read
from foredraft.drafters import eagle, eagle3, hydra
from foredraft.drafters.base import Context
from foredraft.drafters.blockwise_network import BlockSteps
from foredraft.drafters.borrowed import facts
from foredraft.drafters.hydra_network import HydraHeads, HydraSteps
from foredraft.drafters.hydra_prefix import PrefixDrafter
from foredraft.drafters.medusa_heads import Heads, MedusaHeads, outputs
from foredraft.drafters.mlp_network import MLPSpeculator, Steps
from foredraft.drafters.newest import Products
from foredraft.drafters.recurrent import FeatureDrafter
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel
from foredraft.models.window import NORMED, Span, Window

TRUE, DRAFTED = 7, 4  # pairs with true features, then tokens drafted on own outputs
PAGE = 4
TOLERANCE = 1e-5


@cache
def target() -> HFModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    )  # fmt: skip
    return HFModel.adopt(LlamaForCausalLM(config).double(), "the-target")


def context(folder: Path | None = None, fused: bool = False) -> Context:
    model = None if folder is None else str(folder)
    return Context(V, target(), model=model, dtype=torch.float64, fused=fused, num_tokens=3)


def states(count: int, seed: int = 1) -> list[Tensor]:
    """Of the target at `count` boundaries, [TRUE, H] each."""
    g = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(TRUE, H, generator=g, dtype=torch.float64) for _ in range(count)]


TOKENS = [int(x) for x in torch.randint(0, V, (TRUE + DRAFTED,), generator=torch.Generator().manual_seed(2))]


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= TOLERANCE


def drafted(drafter: FeatureDrafter, seen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and features of every row: the true pairs in two passes, then one token after another."""
    lm, pages = drafter.lm, [3, 1, 5, 2]
    features = lm.taken(torch.cat(list(seen), -1))
    logits, following = [], []

    def run(start: int, tokens: Sequence[int], features: Tensor) -> None:
        span = Span(pages, start, tokens, range(len(tokens)))
        window = Window.build([span], range(len(tokens)), PAGE, "cpu")
        for out, got in zip((logits, following), lm.forward(window, features), strict=True):
            out.append(got)

    with torch.no_grad():
        run(0, TOKENS[:4], features[:4])
        run(4, TOKENS[4:TRUE], features[4:])
        for position in range(TRUE, TRUE + DRAFTED):
            run(position, TOKENS[position : position + 1], following[-1][-1:])
    return torch.cat(logits), torch.cat(following)


def rows_of(folder: Path) -> Tensor:
    """Embeddings: the folder's, if there are any."""
    own = folders.stored(folder).get("embed_tokens.weight")
    return target().embedding if own is None else own.double()


def with_rows_like_the_targets(folder: Path) -> Path:
    """Rows of its own that are near the target's, for random ones are taken for an accident."""
    g = torch.Generator().manual_seed(9)
    own = 1.5 * target().embedding + 0.1 * torch.randn(V, H, generator=g, dtype=torch.float64)
    [file] = folder.glob("*.safetensors")
    save_file(load_file(file) | {"embed_tokens.weight": own}, file)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"fc_bias": True},
        {"fc_bias": False, "qkv_bias": True},
        {"layers": 2},
        {"embedding": False},
        {"head_dim": HEAD_DIM, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    ],
)
def test_eagle(tmp_path, options):
    folder = folders.eagle(tmp_path, file="model.safetensors", **options)
    if options.get("embedding", True):
        with_rows_like_the_targets(folder)
    [h] = states(1)
    drafter = eagle.create(eagle.Config(), context(folder))
    assert drafter.taps == (NORMED,)
    logits, features = drafted(drafter, [h])
    numbers = numbers_of(options)
    head = target().model.lm_head.weight.detach()
    wanted = straight.eagle(
        straight.wide(folders.stored(folder)), options.get("layers", 1), TOKENS, h, rows_of(folder), head, numbers
    )
    close(logits, wanted[0])
    close(features, wanted[1])


def numbers_of(options: dict[str, Any]) -> Numbers:
    rope = {**(options.get("rope_scaling") or {}), **(options.get("rope_parameters") or {})}
    return Numbers(theta=rope.get("rope_theta", 500.0), factor=rope.get("factor", 1.0))


SPECULATED = {"norm_before_residual": False}
SLIDES = {"layer_types": ["sliding_attention"], "sliding_window": 3}
TWO = {"layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
CASES: list[tuple[Any, dict[str, Any], Flags]] = [
    (folders.eagle3, {}, Flags()),
    (folders.eagle3, {"whole": True}, Flags()),
    (folders.eagle3, {"embedding": True}, Flags()),
    (folders.eagle3, {"norm_before_residual": True}, Flags(norm_before_residual=True)),
    (folders.eagle3, {"norm_output": True}, Flags(norm_output=True)),
    (folders.eagle3, {"norms": ("input_norm",), "norm_before_fc": True}, Flags()),
    (folders.eagle3, {"norms": ("fc_norm",), "fc_norm": True}, Flags()),
    (folders.eagle3, {"norms": ("aux_norm",)}, Flags()),
    (folders.eagle3, {"qkv_bias": True, "qk_norm": True}, Flags()),
    (folders.eagle3, {"states": 2, IDS: [3, 12]}, Flags()),
    (folders.eagle3, {"states": 1, IDS: [5]}, Flags()),
    (folders.eagle3, {"hidden": 16, "target_hidden_size": H}, Flags()),
    (folders.eagle3, {"head": False, "whole": True}, Flags()),
    (folders.eagle3, {"layers": 2, "first": "layers.0"}, Flags(first="layers.0", layers=2)),
    (folders.specforge, {"ids": [1, 5, 8]}, Flags()),
    (folders.modelopt, {"ids": [1, 5, 8]}, Flags(first="layers.0")),
    (folders.modelopt, {"fc": False}, Flags(first="layers.0")),
    (folders.speculators, {"ids": [2, 6, 9]}, Flags(first="layers.0", norm_before_residual=True)),
    (folders.speculators, {"norm_before_residual": False}, Flags(first="layers.0")),
    (folders.speculators, SPECULATED | SLIDES, Flags(first="layers.0", windows=(3,))),
    (folders.speculators, SPECULATED | TWO, Flags(first="layers.0", layers=2, windows=(None, 5))),
    (folders.speculators, SPECULATED | {"sliding_window": 3}, Flags(first="layers.0")),
    (folders.specforge, {"sliding_window": 3}, Flags()),
    (folders.specforge, {"norm_output": True}, Flags()),
    (folders.specforge, {"norm_output": True, "foredraft_feedback": "normed"}, Flags(norm_output=True)),
    (folders.speculators, SPECULATED | {"norm_output": True}, Flags(first="layers.0", norm_output=True)),
]


@pytest.mark.parametrize(("make", "options", "flags"), CASES)
def test_eagle3(tmp_path, make, options, flags):
    folder = make(tmp_path, **options)
    if options.get("embedding"):
        with_rows_like_the_targets(folder)
    seen = states(options.get("states", 3) if options.get("fc", True) else 1)
    drafter = eagle3.create(eagle3.Config(), context(folder))
    assert len(drafter.taps) == len(seen)
    logits, features = drafted(drafter, seen)
    raw = straight.wide(folders.stored(folder))
    head = raw.get("lm_head.weight", target().model.lm_head.weight.detach())
    wanted = straight.eagle3(raw, TOKENS, seen, rows_of(folder), head, Numbers(), flags)
    close(logits, wanted[0])
    close(features, wanted[1])
    if "d2t" in raw:
        assert drafter.ids.tolist() == [i + int(offset) for i, offset in enumerate(raw["d2t"])]


def test_the_feedback_that_is_asked_for_is_what_drafted_tokens_read(tmp_path):
    """Of one head whose trainer and whose engines disagree, both readings can be had."""
    folder = folders.specforge(tmp_path, norm_output=True)
    seen, raw = states(3), straight.wide(folders.stored(folder))
    for word in ("normed", "raw"):
        drafter = eagle3.create(eagle3.Config(feedback=word), context(folder))
        flags = Flags(norm_output=word == "normed")
        wanted = straight.eagle3(raw, TOKENS, seen, rows_of(folder), raw["lm_head.weight"], Numbers(), flags)
        close(drafted(drafter, seen)[0], wanted[0])
    with pytest.raises(ForedraftError, match="'normed' or 'raw'"):
        eagle3.create(eagle3.Config(feedback="neither"), context(folder))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("version2", [False, True])
def test_medusa(tmp_path, layers, version2):
    folder = folders.medusa(tmp_path, heads=3, layers=layers, version2=version2)
    checkpoint, raw = read(folder, facts(target())), straight.wide(folders.stored(folder))
    shape, tensors = checkpoint.shape, straight.wide(checkpoint.tensors)
    assert isinstance(shape, MedusaShape)
    [h] = states(1)
    lm_head = target().model.lm_head.weight.detach()
    wanted = [straight.medusa(raw, head, layers, h, lm_head if version2 else None) for head in range(3)]
    network = MedusaHeads(shape).double()
    network.load_state_dict(tensors)
    products = Products(context())
    with torch.no_grad():
        for head in range(3):
            ours = network(h, head)
            close(ours @ lm_head.T if version2 else ours, wanted[head])
        laid_out = outputs(shape, tensors, 3, products, target(), V)(Heads(shape, tensors, 3, products)(h), 3)
    close(laid_out, torch.stack(wanted, 1))


@pytest.mark.parametrize("shared", [False, True])
def test_medusa_under_vllms_names(tmp_path, shared):
    folder = folders.vllm_medusa(tmp_path, shared=shared, layers=2)
    raw = {name.removeprefix("medusa_heads."): x for name, x in straight.wide(folders.stored(folder)).items()}
    checkpoint = read(folder, facts(target()))
    tensors = straight.wide(checkpoint.tensors)
    [h] = states(1)
    for head in range(3):
        x = h
        for layer in range(2):
            prefix = f"blocks.{head}.layers.{layer}"
            x = x + straight.silu(x @ raw[f"{prefix}.weight"].T + raw[f"{prefix}.bias"])
        wanted = x @ raw["lm_head.weight" if shared else f"lm_heads.{head}.weight"].T
        close(straight.medusa(tensors, head, 2, h), wanted)


@pytest.mark.parametrize("inner", [24, H])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("tied", "repeated"), [(False, False), (True, False), (True, True)])
def test_mlp_speculator(tmp_path, tied, repeated, scaled, inner):
    folder = folders.mlp_speculator(tmp_path, n=4, tied=tied, repeated=repeated, scaled=scaled, inner=inner)
    checkpoint = read(folder, facts(target()))
    shape, tensors = checkpoint.shape, straight.wide(checkpoint.tensors)
    assert isinstance(shape, SpeculatorShape)
    h = states(1)[0][0]
    wanted = straight.speculator(straight.wide(folders.stored(folder)), 4, tied, scaled, h, TOKENS[:4])
    network = MLPSpeculator(shape).double()
    network.load_state_dict(tensors)
    steps = Steps(shape, tensors, 4, Products(context()), V)
    with torch.no_grad():
        ours, laid_out = network.begin(h), steps.begin(h[None])
        for i, token in enumerate(TOKENS[:4]):
            ours = network(i, ours, torch.tensor(token))
            close(network.logits(i, ours), wanted[i])
            laid_out, logits = steps(i, laid_out, [token])
            close(logits[0], wanted[i])


def test_blockwise(tmp_path):
    folder = folders.blockwise(tmp_path)
    checkpoint, [h] = read(folder, facts(target())), states(1)
    steps = BlockSteps(checkpoint.shape, checkpoint.tensors, 3, Products(context()), target())
    rows, raw, head = steps.begin(h), straight.wide(folders.stored(folder)), target().model.lm_head.weight.detach()
    for i in range(3):
        rows, logits = steps(i, rows, TOKENS[:TRUE])
        close(logits.detach(), straight.blockwise(raw, i, h, head))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("options", [{}, {"own_head": False}, {"rank": 9}])
def test_hydra(tmp_path, options, layers):
    folder = folders.hydra(tmp_path, layers=layers, **options)
    checkpoint, [h] = read(folder, facts(target())), states(1)
    steps = HydraSteps(checkpoint.shape, checkpoint.tensors, 3, Products(context()), target(), V)
    raw, head = straight.wide(folders.stored(folder)), target().model.lm_head.weight.detach()
    rows, lent = steps.begin(h), None if options.get("own_head", True) else head
    embedded = []
    for i in range(3):
        tokens = TOKENS[i : i + TRUE]
        embedded.append(target().embedding[tokens].double())
        rows, logits = steps(i, rows, tokens)
        close(logits.detach(), straight.hydra(raw, i, layers, h, embedded, lent))


@pytest.mark.parametrize(("layers", "said"), [(1, {}), (2, {}), (1, {"rope_theta": 77.0})])
def test_hydra_with_a_prefix_layer(tmp_path, layers, said):
    """In two passes over paged memory as it drafts, and at once as it is trained. Its rotary base is the authors'
    unless the folder names another, and never the target's."""
    assert target().model.config.rope_parameters["rope_theta"] != 10000.0
    folder = folders.hydra(tmp_path, layers=layers, prefix=True, **said)
    drafter, [h] = hydra.create(hydra.Config(), context(folder)), states(1)
    assert isinstance(drafter, PrefixDrafter)
    raw = straight.wide(folders.stored(folder))
    wanted = straight.hydra_prefix(raw, h, Numbers(eps=1e-6, theta=said.get("rope_theta", 10000.0)))
    found = []
    for start, stop in ((0, 4), (4, TRUE)):
        tokens = TOKENS[start:stop]
        window = Window.build([Span([3, 1, 5, 2], start, tokens, range(len(tokens)))], [0], PAGE, "cpu")
        found.append(drafter.lm.forward(window, h[start:stop])[1].detach())
    close(torch.cat(found), wanted)
    checkpoint = read(folder, facts(target()))
    network = HydraHeads(checkpoint.shape, target()).double()
    network.load_state_dict(checkpoint.tensors)
    close(network.read(h[None])[0].detach(), wanted)
    _, logits = drafter.steps(0, wanted, TOKENS[:TRUE])
    embedded = [target().embedding[TOKENS[:TRUE]].double()]
    close(logits.detach(), straight.hydra(names_without_dropout(raw), 0, layers, wanted, embedded))


def names_without_dropout(raw):
    found = {}
    for name, value in raw.items():
        parts = name.split(".")
        if parts[0] == "hydra_mlp":
            parts[2] = str(int(parts[2]) // 2)
        elif parts[0] == "hydra_lm_head":
            del parts[2]
        found[".".join(parts)] = value
    return found
