"""Factory of requests: checks a prompt and its options, and adds seed, end ids and grammar matcher."""

import os
from dataclasses import dataclass, replace
from typing import Any

from foredraft.drafters.spec import DrafterSpec
from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError
from foredraft.image_prompt import ImagePrompt
from foredraft.models.hf import HFModel
from foredraft.models.prompts import Prompt, encode_bad_words, encode_prediction, read_prompt
from foredraft.request import Request
from foredraft.request_options import RequestOptions
from foredraft.request_spec import RequestSpec
from foredraft.sampling.grammar import GrammarCompiler
from foredraft.sampling.grammar_matcher import GrammarMatcher
from foredraft.sampling.params import Sampling
from foredraft.source import PreparedPrompt, Seq2Seq
from foredraft.verification.registry import find_rule
from foredraft.verification.rule import Rule
from foredraft.verification.rules import BLOCK, MATCH, REJECT

MAX_BLOCK_VOCAB = 32_768  # tokens; largest vocabulary for which `auto` chooses `block`


@dataclass(frozen=True)
class RequestFactory:
    """Creates the requests of one model. It does not access the engine, so any thread may use it."""

    target: HFModel
    tokenizer: Any | None
    grammars: GrammarCompiler
    end_ids: frozenset[int]  # token ids that end an output
    rule: Rule | None  # verification rule of requests that name none; None = chosen for every request
    shares_prefixes: bool  # requests of one salt share the pages of equal prefixes
    sampled_rule: Rule = REJECT  # of requests that are neither greedy nor seeded, if `rule` is None

    def prepare(
        self, prompt: Prompt, sampling: Sampling, options: RequestOptions, first_index: int
    ) -> list[Transcript]:
        """Return the n samples of one prompt, ready for an engine.

        Args:
            prompt: text, token ids, or the prompt of an encoder-decoder model.
            sampling: its parameters; `n` is the number of samples.
            options: further options.
            first_index: index of the first sample among all samples of a call.

        Raises:
            ForedraftError: for a prompt or an option that this model does not support.
        """
        ids, source, images = read_prompt(self.target, self.tokenizer, prompt)
        rule = self.rule if options.verify is None else find_rule(options.verify)
        rule = rule or self._choose_rule(sampling)
        _check_simulation(rule, sampling, options)
        prediction = encode_prediction(self.target, self.tokenizer, options.prediction)
        self._check_ids(sampling, prediction, options.shown_tokens)
        seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else sampling.seed
        bad_words = encode_bad_words(self.target, self.tokenizer, sampling.bad_words)
        text = _find_text(prompt)
        page_salt = options.salt
        if source is not None:  # the decoder's KV depends on the source too
            page_salt = source.digest + page_salt
        adapter = None if options.adapter is None else self.target.adapters.find(options.adapter)
        if adapter is not None:  # and so does the KV of an adapter's request
            page_salt = adapter.key + page_salt
        if not self.shares_prefixes:  # only the samples of this prompt have this salt
            page_salt = os.urandom(16)
        spec = RequestSpec(
            prompt=tuple(ids),
            sampling=sampling,
            seed=seed,
            options=options,
            eos_ids=self.end_ids,
            bad_words=bad_words,
            max_length=self.target.context_length,
            rule=rule,
            prediction=prediction,
            page_salt=page_salt,
            source=source,
            adapter=adapter,
            images=images,
        )
        result: list[Transcript] = []
        for sample in range(sampling.n):
            first = result[0].request if result else None
            request = Request(
                slot=-1,
                spec=replace(spec, sample_index=sample),
                waits_for=first,
                matcher=self._create_matcher(sampling),
            )
            result.append(Transcript(request, first_index + sample, self.tokenizer, text))
        return result

    def _choose_rule(self, sampling: Sampling) -> Rule:
        """Return the rule of a request under `verify="auto"`."""
        return MATCH if sampling.is_greedy or sampling.seed is not None else self.sampled_rule

    def _create_matcher(self, sampling: Sampling) -> GrammarMatcher | None:
        if sampling.grammar is None:
            return None
        return self.grammars.create_matcher(
            sampling.grammar, () if sampling.ignore_eos else self.end_ids, sampling.stop_token_ids
        )

    def _check_ids(self, sampling: Sampling, prediction: tuple[int, ...], shown_tokens: tuple[int, ...]) -> None:
        size = self.target.vocab_size
        ids_by_name = {
            name: getattr(sampling, name) or () for name in ("allowed_token_ids", "logit_bias", "stop_token_ids")
        }
        ids_by_name |= {"prediction": prediction, "shown_tokens": shown_tokens}
        ids_by_name["bad_words"] = [token for word in sampling.bad_words if not isinstance(word, str) for token in word]
        for name, ids in ids_by_name.items():
            outside = [token for token in ids if not 0 <= token < size]
            if outside:
                raise ForedraftError(f"{name} holds {outside[0]}, which is outside the vocabulary of {size} tokens")
        if sampling.stop and self.tokenizer is None:
            raise ForedraftError(
                f"{self.target.name} has no tokenizer, so stop strings cannot be found; use stop_token_ids"
            )


def _find_text(prompt: Prompt) -> str | None:
    """Return the text of a prompt; None if it is given as token ids."""
    content: Any = prompt
    if isinstance(prompt, Seq2Seq | PreparedPrompt):
        content = prompt.source
    elif isinstance(prompt, ImagePrompt):
        content = prompt.text
    return content if isinstance(content, str) else None


def _check_simulation(rule: Rule, sampling: Sampling, options: RequestOptions) -> None:
    """Raise ForedraftError for a grammar, which draft tokens do not follow that are accepted whatever p is."""
    if rule.simulated_rate is not None and sampling.grammar is not None and not options.is_plain:
        raise ForedraftError(
            "the grammar cannot be followed: acceptance is simulated, and drafts follow no grammar; leave it out, or "
            "give this request the verification rule 'match', or 0 draft tokens"
        )


def choose_sampled_rule(spec: DrafterSpec, vocab_size: int) -> Rule:
    """Choose between `block` and `reject` for the sampled requests of a drafter.

    On chains `block` accepts at least as much as `reject`, but it computes more rows of p. The choice depends on the
    drafter alone, never on a draft: the rules accept a first token with different probabilities, so a choice that
    follows from the samples would change the distribution.

    Args:
        spec: needs and abilities of the drafter.
        vocab_size: V, which the cost of a row grows with.
    """
    return BLOCK if spec.is_chain and vocab_size <= MAX_BLOCK_VOCAB else REJECT
