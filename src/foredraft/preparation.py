"""Requests of prompts: checked, with their seeds, end ids and grammars."""

import os
from dataclasses import dataclass
from typing import Any

from foredraft.engine.output import Transcript
from foredraft.errors import ForedraftError
from foredraft.grammar import Grammars, Matcher
from foredraft.models.lm import HFModel
from foredraft.models.prompts import Prompt, read_prompt, spelt
from foredraft.request import Request, RequestOptions
from foredraft.sampling import Sampling
from foredraft.source import Begun, Seq2Seq


@dataclass(frozen=True)
class RequestFactory:
    """Makes the requests of one model. Touches no engine, so any thread may use it."""

    target: HFModel
    tokenizer: Any | None
    grammars: Grammars
    end_ids: frozenset[int]  # token ids that end a text
    verify: str  # a rule, or auto
    shares_prefixes: bool  # requests find again what others computed

    def prepare(self, prompt: Prompt, s: Sampling, options: RequestOptions, first_index: int) -> list[Transcript]:
        """The n samples of one prompt, ready for an engine. Raises ForedraftError for what this model cannot do."""
        ids, source = read_prompt(self.target, self.tokenizer, prompt)
        self._check(s, options)
        seed = int.from_bytes(os.urandom(8), "little") if s.seed is None else s.seed
        bad_words = spelt(self.target, self.tokenizer, s.bad_words)
        given = prompt.source if isinstance(prompt, Seq2Seq | Begun) else prompt
        text = given if isinstance(given, str) else None
        salt = options.salt
        if source is not None:  # what the decoder's layers hold is of the source too
            salt = source.digest + salt
        if not self.shares_prefixes:  # a salt that no other request has
            salt = os.urandom(16)
        result: list[Transcript] = []
        for sample in range(s.n):
            request = self._request(ids, s, seed, sample, bad_words, options)
            request.salt, request.source = salt, source
            request.after = result[0].request if result else None
            result.append(Transcript(request, first_index + sample, self.tokenizer, text))
        return result

    def _request(
        self,
        ids: list[int],
        s: Sampling,
        seed: int,
        sample: int,
        bad_words: tuple[tuple[int, ...], ...],
        options: RequestOptions,
    ) -> Request:
        verify = self.verify
        if verify == "auto":
            verify = "match" if s.is_greedy or s.seed is not None else "reject"
        return Request(
            slot=-1,
            prompt=ids,
            sampling=s,
            seed=seed,
            sample=sample,
            eos_ids=self.end_ids,
            bad_words=bad_words,
            max_length=self.target.context_length,
            num_drafts=options.num_speculative_tokens,
            verify=verify,
            priority=options.priority,
            tenant=options.salt,
            prediction=options.prediction,
            matcher=self._matcher(s),
            is_traced=options.is_traced,
        )

    def _matcher(self, s: Sampling) -> Matcher | None:
        if s.grammar is None:
            return None
        return self.grammars.matcher(s.grammar, () if s.ignore_eos else self.end_ids, s.stop_token_ids)

    def _check(self, s: Sampling, options: RequestOptions) -> None:
        size = self.target.vocab_size
        ids_of = {name: getattr(s, name) or () for name in ("allowed_token_ids", "logit_bias", "stop_token_ids")}
        ids_of["prediction"] = options.prediction
        ids_of["bad_words"] = [token for word in s.bad_words if not isinstance(word, str) for token in word]
        for name, named in ids_of.items():
            outside = [token for token in named if not 0 <= token < size]
            if outside:
                raise ForedraftError(f"{name} holds {outside[0]}, which is outside the vocabulary of {size} tokens")
        if s.stop and self.tokenizer is None:
            raise ForedraftError(
                f"{self.target.name} has no tokenizer, so stop strings cannot be found; use stop_token_ids"
            )
