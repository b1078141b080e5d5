"""The pair under test: a target with its drafter, the same target without one, and the prompts of the checks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from foredraft.certify.recorder import StepRecorder
from foredraft.drafters.spec import NO_DRAFT_SPEC, DrafterSpec
from foredraft.llm import LLM
from foredraft.models.prompts import read_prompt
from foredraft.outputs import Completion
from foredraft.request_factory import choose_sampled_rule
from foredraft.request_options import RequestOptions
from foredraft.sampling.params import Sampling
from foredraft.source import PreparedPrompt
from foredraft.verification.rule import Rule
from foredraft.verification.rules import MATCH, REJECT

MAX_CHAIN_NODES = 5  # longest chain in whole outputs; a tree is verified as large as the drafter makes it
ONE_TOKEN = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
# Largest difference of a log-probability between a pass over one token and a pass over several that counts as rounding.
ROUNDING_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}

EncodedPrompt = list[int] | PreparedPrompt


@dataclass(frozen=True)
class Subject:
    """Pair under test.

    Attributes:
        drafting: target with its drafter.
        plain: the same target without a drafter.
        prompts: prompts as token ids, or with the source of an encoder.
        rule: verification rule of requests that are neither greedy nor seeded.
    """

    drafting: LLM
    plain: LLM
    prompts: tuple[EncodedPrompt, ...]
    rule: Rule

    @classmethod
    def make(cls, llm: LLM, texts: Sequence[str]) -> "Subject":
        """Encode the prompts for an LLM with a drafter."""
        encoded: list[EncodedPrompt] = []
        for text in texts:
            ids, source, _ = read_prompt(llm.target, llm.tokenizer, text)
            encoded.append(ids if source is None else PreparedPrompt(source, ids))
        subject = cls(llm, llm.with_drafter(None), tuple(encoded), llm.rule or REJECT)
        if llm.rule is not None:
            return subject
        return replace(subject, rule=choose_sampled_rule(subject.spec, llm.target.vocab_size))

    @property
    def spec(self) -> DrafterSpec:
        """Declaration of the drafter."""
        return NO_DRAFT_SPEC if self.drafting.drafter is None else self.drafting.drafter.spec

    @property
    def num_nodes(self) -> int:
        """Draft nodes per step in whole outputs."""
        return min(self.spec.max_nodes, MAX_CHAIN_NODES) if self.spec.is_chain else self.spec.max_nodes

    @property
    def seeded_rule(self) -> Rule | None:
        """Rule of seeded requests: that of the LLM if it reproduces the output of a seed, else `match`."""
        rule = self.drafting.rule
        return None if rule is None or rule.is_reproducible else MATCH

    @property
    def rounding_limit(self) -> float:
        """Largest difference of a log-probability that counts as rounding, in nats.

        It is 0 for the native decoder and exact modules, whose rows do not depend on the other rows of a pass.
        """
        target = self.plain.target
        is_exact = target.fused is not None or target.has_exact_modules
        return 0.0 if is_exact else ROUNDING_LIMITS[target.model.dtype]

    def draft(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling: Sampling | Sequence[Sampling],
        num_nodes: int | None = None,
        rules: Rule | Sequence[Rule | None] | None = None,
    ) -> list[Completion]:
        """Generate with drafts of a fixed number of nodes. All prompts are one batch.

        Args:
            prompts: encoded prompts.
            sampling: parameters, one for all or one each.
            num_nodes: draft nodes per step. Default None = the property `num_nodes`.
            rules: verification rule, one for all or one each. Default None = that of the LLM.
        """
        each = rules if isinstance(rules, Sequence) else [rules] * len(prompts)
        options = [RequestOptions(num_speculative_tokens=num_nodes or self.num_nodes, verify=rule) for rule in each]
        return self.drafting.generate(list(prompts), sampling, options=options)

    def read_logits(self, prompt: EncodedPrompt, output: Sequence[int]) -> np.ndarray:
        """Return the logits [V] of plain decoding after a prompt and output tokens."""
        recorder = StepRecorder(MATCH, keeps_logits=True)
        options = RequestOptions(verify=recorder.as_rule())
        self.plain.generate([extend_prompt(prompt, output)], ONE_TOKEN, options=options)
        logits = recorder.records[-1].logits
        assert logits is not None
        return logits[0].double().cpu().numpy()


def extend_prompt(prompt: EncodedPrompt, output: Sequence[int]) -> EncodedPrompt:
    """Return the prompt followed by output tokens."""
    if isinstance(prompt, PreparedPrompt):
        return PreparedPrompt(prompt.source, [*prompt.tokens, *output])
    return [*prompt, *output]
