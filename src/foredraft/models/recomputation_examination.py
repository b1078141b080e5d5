"""Examination of a model that runs in no other way: whether whole sequences give the logits of `generate`."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from foredraft.models.cache_examination import TOKENS, find_different_rows
from foredraft.models.recomputed_pass import RecomputedPass, list_argument_names, make_inputs

NUM_GENERATED = 4  # tokens of the compared text after TOKENS


@torch.no_grad()
def examine_recomputed_pass(model: Any) -> RecomputedPass | None:
    """Compare passes over whole sequences with transformers' `generate`, which may use a cache.

    A model whose tokens see later ones runs only if it adds a place after the text, at which it predicts: without one
    it is no language model.

    Returns:
        The pass; None if its logits are not those of `generate`, or if `generate` fails without a cache too.
    """
    try:
        assert model.config.get_text_config().num_hidden_layers > 0, "the engine counts layers"
        ids, expected = _generate(model)
        adds_place = make_inputs(model, ids)["input_ids"].shape[1] > ids.shape[1]
        keeps_logits = "logits_to_keep" in list_argument_names(model)
        ranks = range(len(TOKENS) - 1, ids.shape[1] - 1)
        by_prefix = RecomputedPass(expected.shape[-1], False, keeps_logits)
        if find_different_rows(by_prefix.compute_ranks(model, ids, ranks)[0], expected):
            return None
        if adds_place:
            return by_prefix
        whole = RecomputedPass(expected.shape[-1], True, keeps_logits)
        return None if find_different_rows(whole.compute_ranks(model, ids, ranks)[0], expected) else whole
    except Exception:  # the model's own code may raise any exception in a pass of this kind
        return None


def _generate(model: Any) -> tuple[Tensor, Tensor]:
    """Decode greedily with `generate`, without a cache if it fails with one.

    Returns:
        The sequence [1, L], and the logits [c, V] of its generated tokens.
    """
    try:
        return _call_generate(model, True)
    except Exception:  # the model's own code may raise any exception
        return _call_generate(model, False)


def _call_generate(model: Any, use_cache: bool) -> tuple[Tensor, Tensor]:
    prompt = torch.tensor([TOKENS], device=model.device)
    options = {"do_sample": False, "max_new_tokens": NUM_GENERATED, "min_new_tokens": NUM_GENERATED}
    settings = GenerationConfig(**options, use_cache=use_cache, output_logits=True, return_dict_in_generate=True)
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    return made.sequences, torch.cat(made.logits)
