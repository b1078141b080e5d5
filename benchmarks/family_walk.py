"""Outcome of a family of transformers: its output with drafts against that of transformers' `generate`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.small_families import make_model
from foredraft import LLM, ForedraftError, MemoryLimits, Sampling
from foredraft.models.cache_pass import CachePass
from foredraft.models.compatibility import REMEDY
from foredraft.models.packed_pass import PackedPass
from foredraft.models.recomputed_pass import RecomputedPass
from foredraft.models.recurrent.state_pass import StatePass

NEW_TOKENS = 16  # the sequences become longer than the windows of the small models
PROMPTS = ([5, 9, 7, 11, 5, 9, 7, 11, 5, 9], [3, 4, 3, 4, 3])
KINDS = {
    "native": "native code on CPU",
    "packed": "paged attention",
    "recurrent": "recurrent states, with paged attention if they have any",
    "cached": "their own attention, paged cache",
    "recomputed": "all tokens computed again in every pass",
    "refused": "refused",
    "unmade": "not tried",
    "differs": "fault: output differs",
    "fails": "fault",
}
PASS_KINDS: dict[type, str] = {
    PackedPass: "packed",
    StatePass: "recurrent",
    CachePass: "cached",
    RecomputedPass: "recomputed",
}
# A chain, and a tree with prompts that no step takes whole.
DRAFTS: tuple[dict[str, Any], ...] = (
    {"drafter": "ngram", "num_speculative_tokens": 3},
    {
        "drafter": {"method": "ngram", "branches": 2},
        "num_speculative_tokens": 4,
        "limits": MemoryLimits(page_size=4, max_step_tokens=8),
    },
)


@dataclass(frozen=True)
class FamilyOutcome:
    """Outcome of a family.

    Attributes:
        family: model type in transformers.
        kind: a key of KINDS.
        words: reason or error; empty for a family that runs.
    """

    family: str
    kind: str
    words: str = ""


def list_causal_families() -> list[str]:
    """List the model types that transformers maps to a causal LM."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def read_outcomes(page: str, section: str) -> dict[str, FamilyOutcome]:
    """Read outcomes from a page with tables of `benchmarks.models`.

    Args:
        page: text of the page.
        section: "Decoder-only" or "Encoder-decoder".
    """
    table = page.split(f"### {section} models")[1].split("###")[0]
    outcomes = {}
    for title, names in re.findall(r"^\| (\S.*?) \| (`.*`) \|$", table, re.MULTILINE):
        kind = next(kind for kind, words in KINDS.items() if title == words or title.startswith(words + ": "))
        for family in re.findall(r"`([^`]+)`", names):
            outcomes[family] = FamilyOutcome(family, kind, title.removeprefix(KINDS[kind]).removeprefix(": "))
    return outcomes


def walk_family(family: str, folder: Path) -> FamilyOutcome:
    """Decode with a small random model of a family, alone and in a batch with drafts.

    Args:
        family: model type in transformers.
        folder: empty folder, in which the model is saved and from which it is loaded.
    """
    try:
        model = make_model(family)
    except TimeoutError as error:
        return FamilyOutcome(family, "unmade", str(error))
    except Exception as error:  # a family may object to small sizes in any way
        return FamilyOutcome(family, "unmade", _summarise(error))
    expected = _decode_reference(model)
    model.save_pretrained(folder)
    try:
        return _decode_with_drafts(family, folder, expected)
    except ForedraftError as error:
        reason = _shorten_refusal(str(error).replace(str(folder), "it"))
        if isinstance(expected, str) and reason.startswith("cannot run"):
            return FamilyOutcome(family, "unmade", f"transformers' generate() fails ({expected})")
        return FamilyOutcome(family, "refused", reason)
    except Exception as error:  # any other error is a fault, not a refusal
        return FamilyOutcome(family, "fails", _summarise(error))


def _decode_with_drafts(family: str, folder: Path, expected: list[list[int]] | str) -> FamilyOutcome:
    for options in DRAFTS:
        llm = LLM(folder, tokenizer=None, **options)
        if isinstance(expected, str):
            return FamilyOutcome(family, "unmade", f"transformers' generate() fails ({expected})")
        completions = llm.generate(PROMPTS, Sampling(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
        if [completion.token_ids for completion in completions] != expected:
            return FamilyOutcome(family, "differs")
    if llm.target.fused is not None:
        return FamilyOutcome(family, "native")
    return FamilyOutcome(family, PASS_KINDS[type(llm.target.module_pass)])


def _decode_reference(model: Any) -> list[list[int]] | str:
    """Return the new tokens of `generate` in transformers for every prompt alone, or its error.

    A family whose own cache fails is decoded without one.
    """
    with_cache = _generate(model, {})
    if not isinstance(with_cache, str):
        return with_cache
    without = _generate(model, {"use_cache": False})
    return with_cache if isinstance(without, str) else without


def _generate(model: Any, more: dict[str, Any]) -> list[list[int]] | str:
    generation = model.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = None  # both sides generate all tokens
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **more}
    outputs = []
    try:
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
            outputs.append(list(tokens[len(prompt) :]))
    except Exception as error:  # the model's own code may raise any exception
        return _summarise(error)
    return outputs


def _shorten_refusal(text: str) -> str:
    """Remove from a refusal the names of model and class and the remedy, which are the same in all."""
    return re.sub(r"^\S+ \(\w+\) ", "", text).removesuffix(REMEDY)


def _summarise(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
