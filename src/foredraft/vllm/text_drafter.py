"""Creation of a drafter that reads committed tokens alone, without a target in this process."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from foredraft.drafters.creation import create_drafter
from foredraft.drafters.interface import Drafter
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.registry import parse_config, resolve_method
from foredraft.drafters.spec import DrafterSpec
from foredraft.drafters.user_spec import MethodSpec
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.errors import ForedraftError


@dataclass(frozen=True)
class TextTarget:
    """Facts about the target of another engine.

    Attributes:
        vocab_size: V of its logits.
        context_length: longest sequence, in tokens.
        end_ids: token ids that end an output.
        tokenizer: its tokenizer; None = there is none.
    """

    vocab_size: int
    context_length: int
    end_ids: frozenset[int] = frozenset()
    tokenizer: Any = None


def create_text_drafter(settings: dict[str, Any], num_tokens: int, target: TextTarget) -> SandboxedDrafter:
    """Make the drafter of a specification, in a sandbox.

    Args:
        settings: drafter in the keys of Foredraft's speculative_config.
        num_tokens: longest draft in tokens.
        target: the target that it drafts for.

    Raises:
        ForedraftError: for an unknown method or option, or a drafter that needs more than tokens.
    """
    parsed = MethodSpec.parse(settings)
    try:
        method, implied = resolve_method(parsed.method)
        if parsed.model is not None and not method.uses_model:
            raise ForedraftError(f"the method {method.name} drafts from the tokens alone; leave its model out")
        context = DrafterContext(
            vocab_size=target.vocab_size,
            num_speculative_tokens=num_tokens,
            model=parsed.model,
            tokenizer=target.tokenizer,
            sandbox=partial(_wrap_in_sandbox, target.vocab_size),
        )
        drafter = create_drafter(method, parse_config(method, implied | parsed.options), context)
    except (TypeError, ValueError) as error:
        raise ForedraftError(str(error)) from error
    _check_needs(drafter.spec, str(parsed.method))
    return _wrap_in_sandbox(target.vocab_size, drafter, str(parsed.method))


def _check_needs(spec: DrafterSpec, name: str) -> None:
    """Raise ForedraftError if a drafter needs what another engine does not give it."""
    needs = {
        "hidden states of the target": spec.hidden_layers,
        "a KV cache": spec.draft_kv,
        "the target's KV cache": spec.shares_target_kv,
        "the target's tokens after rejected drafts": spec.needs_target_argmax or spec.num_target_candidates,
    }
    for need, value in needs.items():
        if value:
            raise ForedraftError(
                f"the method {name} needs {need}, and vLLM gives a drafter the tokens alone; use a method that reads "
                "tokens, or hand the drafter over with `foredraft handover --engine vllm`"
            )


def _wrap_in_sandbox(vocab_size: int, drafter: Drafter, name: str) -> SandboxedDrafter:
    return SandboxedDrafter(drafter, vocab_size, name=name)
