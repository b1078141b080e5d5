"""Chimera's folders: what is read of them, and what is refused before a weight is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foredraft.checkpoints.tensors import TensorFiles
from foredraft.drafters.checkpoint_folders import read
from foredraft.drafters.chimera.checkpoint import ChimeraShape
from foredraft.errors import ForedraftError
from tests.support.checkpoints import published_folders
from tests.support.checkpoints.published_folders import HEAD_DIM, HEADS, INNER, KV_HEADS, TARGET, H, V


@pytest.mark.parametrize(("taps", "heads"), [((1, -1), 2), ((3,), 1), ((0, 6, 12), 4)])
def test_what_the_tensors_and_config_say_is_read(tmp_path: Path, taps: tuple[int, ...], heads: int) -> None:
    folder = published_folders.chimera(tmp_path, taps=taps, heads=heads)
    held, raw = read(folder, TARGET, "chimera"), published_folders.read_tensors(folder)
    shape = held.shape
    assert isinstance(shape, ChimeraShape)
    assert (shape.vocab_size, shape.hidden_layers, shape.num_heads, shape.has_fc) == (V, taps, heads, len(taps) > 1)
    block = shape.block
    assert (block.hidden, block.intermediate, block.heads, block.kv_heads, block.head_dim) == (
        H, INNER, HEADS, KV_HEADS, HEAD_DIM,
    )  # fmt: skip
    assert held.tensors.keys() == raw.keys()
    assert all(torch.equal(value, held.tensors[name]) for name, value in raw.items())


def drop_tensors(*names: str) -> Callable[[Path], Path]:
    return lambda f: published_folders.edit_tensors(published_folders.chimera(f, heads=3), drop=names)


def more(name: str, *size: int, dtype: torch.dtype = torch.float32) -> Callable[[Path], Path]:
    return lambda f: published_folders.edit_tensors(
        published_folders.chimera(f), more={name: torch.ones(size, dtype=dtype)}
    )


def said(*drop: str, **config: object) -> Callable[[Path], Path]:
    return lambda f: published_folders.edit_config(published_folders.chimera(f), drop, **config)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (drop_tensors("join.weight"), "join.weight is missing"),
        (drop_tensors("heads.1.weight"), "heads.1.weight is missing"),
        (drop_tensors("norm.weight"), "norm.weight is missing"),
        (drop_tensors("layers.0.self_attn.q_proj.weight"), "q_proj.weight is missing"),
        (drop_tensors("fc.weight"), "fc.weight is missing"),
        (more("heads.1000000000.weight", H, 2 * H), "heads.0.weight is missing"),
        (more("layers.1.mlp.up_proj.weight", 2, 2), "no place for layers.1.mlp.up_proj.weight"),
        (more("heads.0.weight", H, H), "heads.0.weight is"),
        (more("trigram.weight", H, 2 * H), "trigram.weight is"),
        (more("norm.weight", H, 1), "2 dimensions|1 dimensions"),
        (more("join.weight", H, 2 * H, dtype=torch.int64), "stored as int64"),
        (said(target_layer_taps=[1]), "no place for fc.weight"),
        (said("target_layer_taps"), "must set target_layer_taps"),
        (said(target_layer_taps=[]), "must set target_layer_taps"),
        (said(target_layer_taps=[1, 1]), "must set target_layer_taps"),
        (said(target_layer_taps=[[1], 2]), "must set target_layer_taps"),
        (said(target_layer_taps=[True, -1]), "must set target_layer_taps"),
        (said(target_layer_taps="1,-1"), "must set target_layer_taps"),
        (said(target_layer_taps=[1, 13]), "the-target has 12 layers"),
        (said(target_layer_taps=[-2, 1]), "the-target has 12 layers"),
        (said("num_attention_heads"), "num_attention_heads"),
        (said(hidden_size=2 * H), "hidden_size"),
        (said(hidden_act="gelu"), "only silu"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_a_weight_is_read(
    tmp_path: Path, make: Callable[[Path], Path], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path)

    def never(self: TensorFiles, names: object) -> None:
        raise AssertionError(f"read {names}")

    monkeypatch.setattr(TensorFiles, "read", never)
    with pytest.raises(ForedraftError, match=says) as caught:
        read(folder, TARGET)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_another_target_is_refused(tmp_path: Path) -> None:
    folder = published_folders.chimera(tmp_path)
    with pytest.raises(ForedraftError, match="hidden size 32, and the-target has 36"):
        read(folder, replace(TARGET, hidden=36))
    with pytest.raises(ForedraftError, match=f"vocabulary size {V}, and the-target has {V + 8}"):
        read(folder, replace(TARGET, vocab_size=V + 8))
    with pytest.raises(ForedraftError, match="holds Chimera heads, not eagle; use --spec-method chimera"):
        read(folder, TARGET, "eagle")
