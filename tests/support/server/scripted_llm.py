"""A tiny model with the control tokens of all families, whose outputs can be scripted."""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from foredraft import LLM
from foredraft.llm import MemoryLimits
from foredraft.request_factory import RequestFactory
from tests.support import tiny_models

CONTROL = (
    "[TOOL_CALLS] [ARGS] [CALL_ID] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [INST] [/INST] "
    "<|start|> <|channel|> <|message|> <|constrain|> <|end|> <|call|> <|return|> <|python_tag|> "
    "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|begin_of_text|> <s> </s>"
).split()


@dataclass(frozen=True)
class ScriptedFactory(RequestFactory):
    """Factory whose requests write the first of `scripts`, one request each; without a script the model writes."""

    scripts: list[str] = field(default_factory=list)

    def prepare(self, prompt, sampling, options, first_index):
        if not self.scripts:
            return super().prepare(prompt, sampling, options, first_index)
        ids = [*self.tokenizer(self.scripts.pop(0), add_special_tokens=False).input_ids, min(self.end_ids)]

        def write_script(seen: Any, scores: Any) -> Any:
            place = seen.shape[1] - len(prompt)
            token = ids[min(place, len(ids) - 1)]
            forced = scores - 1e9
            forced[:, token] = scores[:, token]  # -inf if a grammar excludes it
            return forced

        return super().prepare(prompt, replace(sampling, logits_processors=(write_script,)), options, first_index)


@cache
def make_control_tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer.from_str(tiny_models.tokenizer().backend_tokenizer.to_str())
    made.add_special_tokens(CONTROL)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@cache
def _make_llm() -> LLM:
    tokenizer = make_control_tokenizer()
    target = tiny_models.llama(len(tokenizer), seed=5, context=2048)
    target.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("<end>")]
    drafter = tiny_models.draft_model(3, model=tiny_models.perturb(target, 0.04))
    return LLM(target, drafter, tokenizer=tokenizer, is_debug=True, limits=MemoryLimits(kv_tokens=8192))


def make_scripted_llm(has_drafter: bool = True) -> tuple[LLM, list[str]]:
    """Return a new engine over the same weights, and the list of its scripts."""
    llm = _make_llm().with_drafter(_make_llm().drafter if has_drafter else None)
    factory = llm._requests
    scripts: list[str] = []
    known = {name: getattr(factory, name) for name in RequestFactory.__dataclass_fields__}
    llm._requests = ScriptedFactory(**known, scripts=scripts)
    return llm, scripts
