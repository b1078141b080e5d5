"""The class that vLLM imports: `--speculative-config '{"method": "custom_class", "model": "foredraft.vllm.Proposer"}'`.

The interface is that of `vllm/v1/spec_decode/custom_class_proposer.py` and `vllm/v1/worker/gpu_model_runner.py`,
release 0.32: rows of token ids, no request ids, no hidden states, no sampling parameters. vLLM verifies a draft with a
one-hot q, so its output keeps the distribution of plain decoding.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.vllm.chain_proposer import ChainProposer
from foredraft.vllm.row_tracker import Row, RowTracker
from foredraft.vllm.settings import SETTINGS_VARIABLE, read_settings
from foredraft.vllm.text_drafter import TextTarget, create_text_drafter

log = logging.getLogger(__name__)


class Proposer:
    """Drafter of Foredraft inside vLLM.

    The drafter is that of the environment variable FOREDRAFT_SPECULATIVE_CONFIG, a JSON object with the keys of
    Foredraft's speculative_config; `num_speculative_tokens` is that of vLLM's own configuration.

    Args:
        vllm_config: vLLM's configuration of the engine (`vllm.config.VllmConfig`).

    Raises:
        ForedraftError: for settings that are invalid, or a method that needs more than tokens.
    """

    def __init__(self, vllm_config: Any) -> None:
        num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        target = read_target(vllm_config.model_config)
        settings = read_settings()
        drafter = create_text_drafter(settings, num_tokens, target)
        self._chains = ChainProposer(drafter, RowTracker(target.context_length, target.end_ids), num_tokens)
        self._context_length = target.context_length
        log.info("Foredraft drafts with %s (%s)", settings, SETTINGS_VARIABLE)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: vLLM calls this for every drafter, and this one has no model of its own in vLLM."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.integer[Any]],
        token_ids_cpu: NDArray[np.integer[Any]],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return draft tokens for every request of the step.

        Args:
            sampled_token_ids: B lists of the tokens that the step added, accepted draft tokens first; empty for a
                prompt that is not computed to its end.
            num_tokens_no_spec: [B] tokens of each request, without its draft.
            token_ids_cpu: [B, context length] token ids of each request.
            slot_mappings: ignored.

        Returns:
            B lists of at most num_speculative_tokens tokens.
        """
        rows = [
            Row(index, token_ids_cpu[index, : int(num_tokens_no_spec[index])], len(new_tokens))
            for index, new_tokens in enumerate(sampled_token_ids)
            if len(new_tokens) and len(new_tokens) < int(num_tokens_no_spec[index]) < self._context_length
        ]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, draft in zip(rows, self._chains.propose(rows), strict=True):
            drafts[row.index] = draft
        return drafts


def read_target(model_config: Any) -> TextTarget:
    """Return the facts of vLLM's target that drafters need, from its `ModelConfig`."""
    return TextTarget(
        vocab_size=int(model_config.get_vocab_size()),
        context_length=int(model_config.max_model_len),
        end_ids=_read_end_ids(model_config),
        tokenizer=_load_tokenizer(model_config),
    )


def _read_end_ids(model_config: Any) -> frozenset[int]:
    """Return the token ids that end an output, from generation_config.json and config.json."""
    found: set[int] = set()
    for config in (model_config.try_get_generation_config(), model_config.hf_config.to_dict()):
        ids = config.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def _load_tokenizer(model_config: Any) -> Any:
    """Load the target's tokenizer; None if vLLM runs without one."""
    if model_config.skip_tokenizer_init:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            model_config.tokenizer, revision=model_config.tokenizer_revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:  # only drafters that search in text need it
        log.info("Foredraft drafts without a tokenizer: %s", error)
        return None
