"""A head's drafter is made from its checkpoint, without code of the method."""

from dataclasses import replace
from typing import Any

import pytest

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.write import save
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.creation import create_drafter
from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.registry import load_methods
from foredraft.errors import ForedraftError
from tests.support import tiny_models

MEDUSA = load_methods()["medusa"]


def context(model: Any = None) -> DrafterContext:
    target = tiny_models.plain().target
    return DrafterContext(tiny_models.VOCAB, target, 3, model=model, dtype=target.model.dtype)


def test_the_head_that_the_user_names_is_read(tmp_path: Any) -> None:
    assert MEDUSA.training is not None
    assert MEDUSA.training.create_trainee is not None
    assert MEDUSA.create is None
    trainee = MEDUSA.training.create_trainee(MEDUSA.training.config(heads=2), tiny_models.plain().target, None)
    saved = trainee.to_checkpoint()
    save(tmp_path, CheckpointLayout("medusa", saved.tensors, saved.config))
    assert create_drafter(MEDUSA, MEDUSA.config(), context(str(tmp_path))).spec.max_nodes == 2


def test_options_are_checked_before_a_folder_is_opened() -> None:
    method = replace(MEDUSA, config=TreeOptions, check_options=TreeOptions.to_tree_spec)
    with pytest.raises(ForedraftError, match=r"min_confidence must lie in 0\.\.1"):
        create_drafter(method, TreeOptions(min_confidence=2.0), context())
    with pytest.raises(ForedraftError, match="the method medusa needs a head trained for this target"):
        create_drafter(method, TreeOptions(), context())


def test_a_methods_own_maker_has_precedence() -> None:
    made = load_methods()["ngram"]
    assert made.create is not None
    config = made.config()
    assert type(create_drafter(made, config, context())) is type(made.create(config, context()))


def test_a_method_has_a_maker() -> None:
    with pytest.raises(ValueError, match="create or with from_checkpoint"):
        Method("none", TreeOptions)
