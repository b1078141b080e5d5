"""Outputs of published folders after loading: first-step and recurrent outputs equal those of the formulas.

Networks run on paged memory, as drafters run them. The formulas in reference_networks.py run on whole sequences.
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

from foredraft.drafters.blockwise.network import BlockwiseStepRunner
from foredraft.drafters.checkpoint_folders import read
from foredraft.drafters.common.feature_drafter import FeatureDrafter
from foredraft.drafters.common.last_hidden_state import LinearFactory
from foredraft.drafters.common.target_access import describe_target
from foredraft.drafters.creation import create_drafter
from foredraft.drafters.eagle import method as eagle
from foredraft.drafters.eagle3 import method as eagle3
from foredraft.drafters.hydra import method as hydra
from foredraft.drafters.hydra.network import HydraHeads, HydraStepRunner
from foredraft.drafters.hydra.prefix import HydraPrefixDrafter
from foredraft.drafters.medusa.checkpoint import MedusaShape
from foredraft.drafters.medusa.network import MedusaHeadRunner, MedusaHeads, make_output_function
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.mlp_speculator.network import MLPSpeculator, MLPStepRunner
from foredraft.drafters.mlp_speculator.shape import MlpSpeculatorShape
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch, Span
from foredraft.models.hf import HFModel
from tests.support.checkpoints import published_folders, reference_networks
from tests.support.checkpoints.published_folders import HEAD_DIM, IDS, LAYERS, H, V
from tests.support.checkpoints.reference_networks import Eagle3Flags, LayerNumbers

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
    return HFModel.wrap_model(LlamaForCausalLM(config).double(), "the-target")


def context(folder: Path | None = None, fused: bool = False) -> DrafterContext:
    model = None if folder is None else str(folder)
    return DrafterContext(V, target(), model=model, dtype=torch.float64, fused=fused, num_speculative_tokens=3)


def states(count: int, seed: int = 1) -> list[Tensor]:
    """Make random states of the target at `count` boundaries, [TRUE, H] each."""
    g = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(TRUE, H, generator=g, dtype=torch.float64) for _ in range(count)]


TOKENS = [int(x) for x in torch.randint(0, V, (TRUE + DRAFTED,), generator=torch.Generator().manual_seed(2))]


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= TOLERANCE


def run_drafter(drafter: FeatureDrafter, seen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute logits and features of every row: the true pairs in two passes, then one token after another."""
    lm, pages = drafter.lm, [3, 1, 5, 2]
    features = lm.project_features(torch.cat(list(seen), -1))
    logits, following = [], []

    def run(start: int, tokens: Sequence[int], features: Tensor) -> None:
        span = Span(pages, start, tokens, range(len(tokens)))
        window = ForwardBatch.build([span], range(len(tokens)), PAGE, "cpu")
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
    own = published_folders.read_tensors(folder).get("embed_tokens.weight")
    return target().embedding if own is None else own.double()


def with_rows_like_the_targets(folder: Path) -> Path:
    """Give the drafter embedding rows near the target's; random rows are refused as an accident."""
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
    folder = published_folders.eagle(tmp_path, file="model.safetensors", **options)
    if options.get("embedding", True):
        with_rows_like_the_targets(folder)
    [h] = states(1)
    drafter = create_drafter(eagle.METHOD, eagle.Config(), context(folder))
    assert drafter.spec.hidden_layers == (AFTER_FINAL_NORM,)
    logits, features = run_drafter(drafter, [h])
    numbers = numbers_of(options)
    head = target().model.lm_head.weight.detach()
    wanted = reference_networks.eagle(
        reference_networks.to_double(published_folders.read_tensors(folder)),
        options.get("layers", 1),
        TOKENS,
        h,
        rows_of(folder),
        head,
        numbers,
    )
    close(logits, wanted[0])
    close(features, wanted[1])


def numbers_of(options: dict[str, Any]) -> LayerNumbers:
    rope = {**(options.get("rope_scaling") or {}), **(options.get("rope_parameters") or {})}
    return LayerNumbers(theta=rope.get("rope_theta", 500.0), factor=rope.get("factor", 1.0))


SPECULATED = {"norm_before_residual": False}
SLIDES = {"layer_types": ["sliding_attention"], "sliding_window": 3}
TWO = {"layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
CASES: list[tuple[Any, dict[str, Any], Eagle3Flags]] = [
    (published_folders.eagle3, {}, Eagle3Flags()),
    (published_folders.eagle3, {"whole": True}, Eagle3Flags()),
    (published_folders.eagle3, {"embedding": True}, Eagle3Flags()),
    (published_folders.eagle3, {"norm_before_residual": True}, Eagle3Flags(norm_before_residual=True)),
    (published_folders.eagle3, {"norm_output": True}, Eagle3Flags(norm_output=True)),
    (published_folders.eagle3, {"norms": ("input_norm",), "norm_before_fc": True}, Eagle3Flags()),
    (published_folders.eagle3, {"norms": ("fc_norm",), "fc_norm": True}, Eagle3Flags()),
    (published_folders.eagle3, {"norms": ("aux_norm",)}, Eagle3Flags()),
    (published_folders.eagle3, {"qkv_bias": True, "qk_norm": True}, Eagle3Flags()),
    (published_folders.eagle3, {"states": 2, IDS: [3, 12]}, Eagle3Flags()),
    (published_folders.eagle3, {"states": 1, IDS: [5]}, Eagle3Flags()),
    (published_folders.eagle3, {"hidden": 16, "target_hidden_size": H}, Eagle3Flags()),
    (published_folders.eagle3, {"head": False, "whole": True}, Eagle3Flags()),
    (published_folders.eagle3, {"layers": 2, "first": "layers.0"}, Eagle3Flags(first="layers.0", layers=2)),
    (published_folders.specforge, {"ids": [1, 5, 8]}, Eagle3Flags()),
    (published_folders.modelopt, {"ids": [1, 5, 8]}, Eagle3Flags(first="layers.0")),
    (published_folders.modelopt, {"fc": False}, Eagle3Flags(first="layers.0")),
    (published_folders.speculators, {"ids": [2, 6, 9]}, Eagle3Flags(first="layers.0", norm_before_residual=True)),
    (published_folders.speculators, {"norm_before_residual": False}, Eagle3Flags(first="layers.0")),
    (published_folders.speculators, SPECULATED | SLIDES, Eagle3Flags(first="layers.0", windows=(3,))),
    (published_folders.speculators, SPECULATED | TWO, Eagle3Flags(first="layers.0", layers=2, windows=(None, 5))),
    (published_folders.speculators, SPECULATED | {"sliding_window": 3}, Eagle3Flags(first="layers.0")),
    (published_folders.specforge, {"sliding_window": 3}, Eagle3Flags()),
    (published_folders.specforge, {"norm_output": True}, Eagle3Flags()),
    (published_folders.specforge, {"norm_output": True, "foredraft_feedback": "normed"}, Eagle3Flags(norm_output=True)),
    (
        published_folders.speculators,
        SPECULATED | {"norm_output": True},
        Eagle3Flags(first="layers.0", norm_output=True),
    ),
]


@pytest.mark.parametrize(("make", "options", "flags"), CASES)
def test_eagle3(tmp_path, make, options, flags):
    folder = make(tmp_path, **options)
    if options.get("embedding"):
        with_rows_like_the_targets(folder)
    seen = states(options.get("states", 3) if options.get("fc", True) else 1)
    drafter = create_drafter(eagle3.METHOD, eagle3.Config(), context(folder))
    assert len(drafter.spec.hidden_layers) == len(seen)
    logits, features = run_drafter(drafter, seen)
    raw = reference_networks.to_double(published_folders.read_tensors(folder))
    head = raw.get("lm_head.weight", target().model.lm_head.weight.detach())
    wanted = reference_networks.eagle3(raw, TOKENS, seen, rows_of(folder), head, LayerNumbers(), flags)
    close(logits, wanted[0])
    close(features, wanted[1])
    if "d2t" in raw:
        assert drafter.token_ids.tolist() == [i + int(offset) for i, offset in enumerate(raw["d2t"])]


def test_the_feedback_that_is_asked_for_is_what_drafted_tokens_read(tmp_path):
    """The trainer and the engines disagree about the feedback of this head; the option selects either."""
    folder = published_folders.specforge(tmp_path, norm_output=True)
    seen, raw = states(3), reference_networks.to_double(published_folders.read_tensors(folder))
    for word in ("normed", "raw"):
        drafter = create_drafter(eagle3.METHOD, eagle3.Config(feedback=word), context(folder))
        flags = Eagle3Flags(norm_output=word == "normed")
        wanted = reference_networks.eagle3(
            raw, TOKENS, seen, rows_of(folder), raw["lm_head.weight"], LayerNumbers(), flags
        )
        close(run_drafter(drafter, seen)[0], wanted[0])
    with pytest.raises(ForedraftError, match="'normed' or 'raw'"):
        create_drafter(eagle3.METHOD, eagle3.Config(feedback="neither"), context(folder))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("version2", [False, True])
def test_medusa(tmp_path, layers, version2):
    folder = published_folders.medusa(tmp_path, heads=3, layers=layers, version2=version2)
    checkpoint, raw = (
        read(folder, describe_target(target())),
        reference_networks.to_double(published_folders.read_tensors(folder)),
    )
    shape, tensors = checkpoint.shape, reference_networks.to_double(checkpoint.tensors)
    assert isinstance(shape, MedusaShape)
    [h] = states(1)
    lm_head = target().model.lm_head.weight.detach()
    wanted = [reference_networks.medusa(raw, head, layers, h, lm_head if version2 else None) for head in range(3)]
    network = MedusaHeads(shape).double()
    network.load_state_dict(tensors)
    products = LinearFactory(context())
    with torch.no_grad():
        for head in range(3):
            ours = network(h, head)
            close(ours @ lm_head.T if version2 else ours, wanted[head])
        laid_out = make_output_function(shape, tensors, 3, products, target(), V)(
            MedusaHeadRunner(shape, tensors, 3, products)(h), 3
        )
    close(laid_out, torch.stack(wanted, 1))


@pytest.mark.parametrize("shared", [False, True])
def test_medusa_under_vllms_names(tmp_path, shared):
    folder = published_folders.vllm_medusa(tmp_path, shared=shared, layers=2)
    raw = {
        name.removeprefix("medusa_heads."): x
        for name, x in reference_networks.to_double(published_folders.read_tensors(folder)).items()
    }
    checkpoint = read(folder, describe_target(target()))
    tensors = reference_networks.to_double(checkpoint.tensors)
    [h] = states(1)
    for head in range(3):
        x = h
        for layer in range(2):
            prefix = f"blocks.{head}.layers.{layer}"
            x = x + reference_networks.silu(x @ raw[f"{prefix}.weight"].T + raw[f"{prefix}.bias"])
        wanted = x @ raw["lm_head.weight" if shared else f"lm_heads.{head}.weight"].T
        close(reference_networks.medusa(tensors, head, 2, h), wanted)


@pytest.mark.parametrize("inner", [24, H])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("tied", "repeated"), [(False, False), (True, False), (True, True)])
def test_mlp_speculator(tmp_path, tied, repeated, scaled, inner):
    folder = published_folders.mlp_speculator(tmp_path, n=4, tied=tied, repeated=repeated, scaled=scaled, inner=inner)
    checkpoint = read(folder, describe_target(target()))
    shape, tensors = checkpoint.shape, reference_networks.to_double(checkpoint.tensors)
    assert isinstance(shape, MlpSpeculatorShape)
    h = states(1)[0][0]
    wanted = reference_networks.speculator(
        reference_networks.to_double(published_folders.read_tensors(folder)), 4, tied, scaled, h, TOKENS[:4]
    )
    network = MLPSpeculator(shape).double()
    network.load_state_dict(tensors)
    steps = MLPStepRunner(shape, tensors, 4, LinearFactory(context()), V)
    with torch.no_grad():
        ours, laid_out = network.begin(h), steps.begin(h[None])
        for i, token in enumerate(TOKENS[:4]):
            ours = network(i, ours, torch.tensor(token))
            close(network.compute_logits(i, ours), wanted[i])
            laid_out, logits = steps(i, laid_out, [token])
            close(logits[0], wanted[i])


def test_blockwise(tmp_path):
    folder = published_folders.blockwise(tmp_path)
    checkpoint, [h] = read(folder, describe_target(target())), states(1)
    steps = BlockwiseStepRunner(checkpoint.shape, checkpoint.tensors, 3, LinearFactory(context()), target())
    rows, raw, head = (
        steps.begin(h),
        reference_networks.to_double(published_folders.read_tensors(folder)),
        target().model.lm_head.weight.detach(),
    )
    for i in range(3):
        rows, logits = steps(i, rows, TOKENS[:TRUE])
        close(logits.detach(), reference_networks.blockwise(raw, i, h, head))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("options", [{}, {"own_head": False}, {"rank": 9}])
def test_hydra(tmp_path, options, layers):
    folder = published_folders.hydra(tmp_path, layers=layers, **options)
    checkpoint, [h] = read(folder, describe_target(target())), states(1)
    steps = HydraStepRunner(checkpoint.shape, checkpoint.tensors, 3, LinearFactory(context()), target(), V)
    raw, head = (
        reference_networks.to_double(published_folders.read_tensors(folder)),
        target().model.lm_head.weight.detach(),
    )
    rows, lent = steps.begin(h), None if options.get("own_head", True) else head
    embedded = []
    for i in range(3):
        tokens = TOKENS[i : i + TRUE]
        embedded.append(target().embedding[tokens].double())
        rows, logits = steps(i, rows, tokens)
        close(logits.detach(), reference_networks.hydra(raw, i, layers, h, embedded, lent))


@pytest.mark.parametrize(("layers", "said"), [(1, {}), (2, {}), (1, {"rope_theta": 77.0})])
def test_hydra_with_a_prefix_layer(tmp_path, layers, said):
    """Drafts take two passes over paged memory, training takes one pass. The rotary base is that of the publication
    unless the folder names another. It is never the target's."""
    assert target().model.config.rope_parameters["rope_theta"] != 10000.0
    folder = published_folders.hydra(tmp_path, layers=layers, prefix=True, **said)
    drafter, [h] = create_drafter(hydra.METHOD, hydra.Config(), context(folder)), states(1)
    assert isinstance(drafter, HydraPrefixDrafter)
    raw = reference_networks.to_double(published_folders.read_tensors(folder))
    wanted = reference_networks.hydra_prefix(raw, h, LayerNumbers(eps=1e-6, theta=said.get("rope_theta", 10000.0)))
    found = []
    for start, stop in ((0, 4), (4, TRUE)):
        tokens = TOKENS[start:stop]
        window = ForwardBatch.build([Span([3, 1, 5, 2], start, tokens, range(len(tokens)))], [0], PAGE, "cpu")
        found.append(drafter.lm.forward(window, h[start:stop])[1].detach())
    close(torch.cat(found), wanted)
    checkpoint = read(folder, describe_target(target()))
    network = HydraHeads(checkpoint.shape, target()).double()
    network.load_state_dict(checkpoint.tensors)
    close(network.encode_features(h[None])[0].detach(), wanted)
    _, logits = drafter.runner(0, wanted, TOKENS[:TRUE])
    embedded = [target().embedding[TOKENS[:TRUE]].double()]
    close(logits.detach(), reference_networks.hydra(names_without_dropout(raw), 0, layers, wanted, embedded))


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
