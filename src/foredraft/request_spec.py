"""Definition of a request: the facts that are given when it is made and never change."""

from dataclasses import dataclass, field

from foredraft.loaded_adapter import LoadedAdapter
from foredraft.placed_images import PlacedImages
from foredraft.request_options import RequestOptions
from foredraft.sampling.params import Sampling
from foredraft.source import EncoderSource
from foredraft.verification.rule import Rule
from foredraft.verification.rules import MATCH


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity; slots: no `__dict__` through which to change it
class RequestSpec:
    """Definition of one sequence: prompt, parameters and rule. A request keeps one for its whole life."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int  # sampling.seed, or a random one
    options: RequestOptions = field(default_factory=RequestOptions)
    sample_index: int = 0  # index among the n requests (samples) of one prompt
    eos_ids: frozenset[int] = frozenset()  # end ids of the model
    bad_words: tuple[tuple[int, ...], ...] = ()  # sampling.bad_words as token ids
    max_length: int = 1 << 62  # context length: prompt and output together
    rule: Rule = MATCH  # verification rule
    prediction: tuple[int, ...] = ()  # options.prediction as token ids
    # Only requests with equal values share prefix pages: options.salt with the digest of an encoder's source and the
    # key of the adapter, or random bytes if the engine shares no prefixes.
    page_salt: bytes = b""
    source: EncoderSource | None = None  # input of the encoder, if the model has one; `prompt` is then the decoder's
    adapter: LoadedAdapter | None = None  # LoRA adapter of the target, by the name in the options
    images: PlacedImages | None = None  # images of the prompt, encoded

    @property
    def input_tokens(self) -> tuple[int, ...]:
        """Tokens of the encoder's source if there is one, else the prompt."""
        return self.source.tokens if self.source is not None and self.source.tokens else self.prompt

    @property
    def max_output_tokens(self) -> int:
        """Largest number of output tokens, by `sampling.max_tokens` and the context length."""
        return min(self.sampling.max_tokens, self.max_length - len(self.prompt))

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end the output: stop ids of the request, and end ids of the model unless ignored."""
        own = frozenset(self.sampling.stop_token_ids)
        return own if self.sampling.ignore_eos else own | self.eos_ids
