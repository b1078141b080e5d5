"""Requests of a soak, and the checks of their outputs.

Every output is compared with the model itself: one pass of transformers over all of it, without cache, batch or draft.
An output is right if every token is the one-token oracle's after those before it, and if it ends at the right token.
"""

import gc
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from foredraft.draft_length.policy import DraftCandidate, FixedLengthPolicy
from foredraft.engine.engine import Engine
from foredraft.engine.transcript import Transcript
from foredraft.llm import MemoryLimits
from foredraft.outputs import Completion
from foredraft.request import Request
from foredraft.request_spec import RequestSpec
from foredraft.sampling import rng
from foredraft.sampling.distribution import TokenHistory, distribution
from foredraft.sampling.params import Sampling
from foredraft.sampling.rng import NoiseStream
from tests.support import tiny_models

# of the tiny model's vocabulary; several requests begin with each, so that a prefix cache has something to find
OPENINGS = [[(7 * i + k) % 89 + 4 for i in range(24 + 5 * k)] for k in range(4)]
LIMITS = MemoryLimits(kv_tokens=144, page_size=4, max_batch=8)  # a third of what eight requests need
IN_FLIGHT = 20  # requests that run or wait


@dataclass(frozen=True)
class SoakRequest:
    """One request, and the time at which its client hangs up."""

    prompt: list[int]
    sampling: Sampling
    abort_at: int | None  # tokens; 0 = before the first, after `patience` steps
    patience: int


def generate_requests(count: int, seed: int = 0) -> Iterator[SoakRequest]:
    """Greedy and seeded, short and long, three in ten to be aborted."""
    rng = random.Random(seed)
    for index in range(count):
        prompt = rng.choice(OPENINGS)[: rng.randint(1, 40)] + [rng.randrange(4, 93) for _ in range(rng.randint(1, 12))]
        is_aborted = index % 10 in (2, 5, 9)
        sampling = Sampling(max_tokens=rng.randint(6, 48), ignore_eos=is_aborted, **_make_sampling_options(rng, index))
        abort_at = rng.randint(0, sampling.max_tokens // 2) if is_aborted else None
        yield SoakRequest(prompt, sampling, abort_at, rng.randint(0, 6))


def _make_sampling_options(rng: random.Random, index: int) -> dict[str, float]:
    if rng.random() < 0.5:
        return {"temperature": 0.0}
    plain = {"temperature": 0.7, "top_p": 0.9, "seed": index}
    return plain if rng.random() < 0.6 else plain | {"repetition_penalty": 1.1, "frequency_penalty": 0.1}


class RandomLengthPolicy(FixedLengthPolicy):
    """Draft lengths that change at random with every step, none among them. Drafting rests at random too."""

    def __init__(self, seed: int = 3) -> None:
        self._rng = random.Random(seed)

    def allocate(
        self, candidates: Sequence[DraftCandidate], num_pass_tokens: int, attended_tokens: int = 0
    ) -> list[int]:
        return [self._rng.randint(0, ask.max_nodes) for ask in candidates]

    @property
    def is_resting(self) -> bool:
        return self._rng.random() < 0.3

    @property
    def needs_observation(self) -> bool:
        return self._rng.random() < 0.9


@dataclass
class SoakChecker:
    """Takes every transcript that ended, keeps none, and looks at the memory on the way."""

    count: int
    finished: int = 0
    aborted: int = 0
    accepted: int = 0
    rejected: int = 0
    memory: dict[int, int] = field(default_factory=dict)  # percent of the requests -> bytes of the process
    _requests: list["weakref.ref[Request]"] = field(default_factory=list)

    def record(self, transcript: Transcript, completion: Completion) -> None:
        assert completion.error is None, completion.error
        self._requests.append(weakref.ref(transcript.request))
        if completion.finish_reason == "abort":
            self.aborted += 1
        else:
            self.finished += 1
        self.accepted += completion.stats.num_accepted
        self.rejected += completion.stats.num_drafted - completion.stats.num_accepted
        self._check_output(transcript.request, completion)
        percent = 100 * (self.finished + self.aborted) // self.count
        if percent not in self.memory and percent % 25 == 0:
            gc.collect()
            self.memory[percent] = read_resident_bytes()

    def _check_output(self, request: Request, completion: Completion) -> None:
        spec, tokens = request.spec, completion.token_ids
        assert tokens == compute_expected(spec, tokens), f"a wrong text: {spec.prompt} {spec.sampling}"
        ends = [i for i, token in enumerate(tokens) if token in spec.end_ids]
        if completion.finish_reason == "stop":
            assert ends == [len(tokens) - 1]
        else:
            assert not ends
            assert (len(tokens) == spec.sampling.max_tokens) == (completion.finish_reason == "length")

    def check_end(self, engine: Engine) -> None:
        """Check that no page, slot or request is left."""
        allocator = engine.scheduler.allocator
        assert not engine.has_work
        assert not engine.transcripts
        assert allocator.num_used == 0
        cached = getattr(allocator, "num_cached", 0)
        assert allocator.num_free + cached + 1 == allocator.num_pages
        engine.scheduler.check_integrity()
        gc.collect()
        alive = sum(reference() is not None for reference in self._requests)
        assert alive <= 1, f"{alive} requests that ended are still held"  # the caller may hold one


@cache
def model() -> LlamaForCausalLM:
    """Load the same weights under transformers' own attention."""
    return tiny_models.llama()


def compute_expected(spec: RequestSpec, tokens: list[int]) -> list[int]:
    """Compute the oracle's token at every position, given the tokens before it."""
    if not tokens:
        return []
    text = torch.tensor([[*spec.prompt, *tokens[:-1]]])
    with torch.inference_mode():
        logits = model()(text, use_cache=False).logits[0, len(spec.prompt) - 1 :]
    ends = tuple(sorted(spec.end_ids))
    histories = [TokenHistory(spec.prompt, tokens[:i], (), ends, ()) for i in range(len(tokens))]
    distributions = distribution(logits, spec.sampling, histories)
    first = len(spec.prompt)
    keys = [rng.derive_key(spec.seed, spec.sample_index, NoiseStream.TOKEN, first + i) for i in range(len(tokens))]
    return rng.exponential_race(distributions, torch.tensor(keys)).argmax(-1).tolist()


def read_resident_bytes() -> int:
    """Return the resident bytes of this process; 0 if the system does not report them."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0
