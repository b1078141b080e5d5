"""Random mixes of requests, run together under a drafter and compared with plain decoding of each request alone.

A seed determines the whole mix: the prompts, when each request arrives and leaves, the size of the memory and the
steps that fail. A request that ends must end as it does alone, without a drafter and with enough memory. An aborted
request must have a prefix of that output.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from foredraft import LLM, Completion, Grammar, RequestOptions, Sampling, Seq2Seq
from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.policy import DraftCandidate as DraftAsk
from foredraft.draft_length.policy import DraftLengthPolicy, FixedLengthPolicy
from foredraft.engine.transcript import Transcript
from foredraft.llm import MemoryLimits
from foredraft.request import Request
from foredraft.verification.rule import Rule
from tests.support.attacks.mix_targets import MixTarget, get_mix_target
from tests.support.grammar_cases import TIGHT, make_schema

CONTEXT = 256  # of the decoder-only models; 128 for the encoder-decoder
MOST_STEPS = 20_000  # a mix takes a few hundred
ROUNDING = 1e-9  # of log-probabilities in float64; passes of other sizes sum in another order


class InjectedError(RuntimeError):
    """A step that was made to fail."""


class RandomLengthPolicy(FixedLengthPolicy):
    """Draft lengths that change at random with every step, none among them. Drafting rests at random too."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def allocate(self, candidates: Sequence[DraftAsk], num_rows: int, attended_tokens: int = 0) -> list[int]:
        return [self._rng.randint(0, ask.max_nodes) for ask in candidates]

    @property
    def is_resting(self) -> bool:
        return self._rng.random() < 0.3

    @property
    def needs_observation(self) -> bool:
        return self._rng.random() < 0.9


@dataclass(frozen=True)
class MixRequest:
    """One request of a mix."""

    prompt: Any  # token ids, or Seq2Seq
    sampling: Sampling
    options: RequestOptions
    arrives: int  # step
    leaves: int | None  # tokens after which its client leaves; None = it stays
    patience: int  # steps until a client that leaves before the first token does

    @property
    def is_keyed(self) -> bool:
        """Its text depends on nothing but itself; any other is sampled anew every time."""
        return self.sampling.is_greedy or self.sampling.seed is not None


@dataclass(frozen=True)
class RequestMix:
    """Everything that happens in a run but for the drafter's own choices."""

    seed: int
    asks: tuple[MixRequest, ...]
    limits: MemoryLimits
    max_chunk: int
    num_tokens: int  # longest draft
    lengths: str
    failing: frozenset[int]  # passes of the target that raise


@dataclass
class MixOutcome:
    """Faults and counts of one run."""

    faults: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)


def make_mix(kind: str, seed: int, count: int) -> RequestMix:
    """Make the mix of a seed for one target. Predictions need a text, so they come from plain decoding."""
    rng = random.Random(f"{kind} {seed}")
    place = get_mix_target(kind)
    is_vast = rng.random() < 0.2  # with prompts up to the end of the context
    asks = tuple(_make_request(rng, place, is_vast) for _ in range(count))
    most = max(_count_tokens(place, ask) for ask in asks)
    page = rng.choice((1, 2, 4, 4, 16))
    room = -(-max(most, rng.randint(44, 96)) // page) * page
    limits = MemoryLimits(
        kv_tokens=room,
        page_size=page,
        max_batch=rng.choice((1, 2, 8, 8, 16, 32)),
        max_step_tokens=rng.choice((24, 48, 2048)),
        prefix_cache=rng.random() < 0.7,
    )
    failing = frozenset(rng.randint(1, 60) for _ in range(rng.choice((0, 0, 1, 3))))
    lengths = rng.choice(("fixed", "restless", "restless", "adaptive"))
    return RequestMix(seed, asks, limits, rng.choice((3, 7, 512)), rng.choice((1, 2, 3, 4, 5, 8)), lengths, failing)


def _count_tokens(place: MixTarget, ask: MixRequest) -> int:
    prompt = 1 if isinstance(ask.prompt, Seq2Seq) else len(ask.prompt)
    return min(prompt + ask.sampling.max_tokens, place.plain.target.context_length)


def _make_request(rng: random.Random, place: MixTarget, is_vast: bool) -> MixRequest:
    sampling = _make_sampling(rng, place)
    prompt = _make_prompt(rng, place, is_vast)
    leaves = rng.randint(0, sampling.max_tokens // 2) if rng.random() < 0.25 else None
    options = RequestOptions(
        priority=rng.choice((0, 0, 0, -1, 1, 5)),
        num_speculative_tokens=rng.choice((None, None, None, None, 0, 1, 3, 8)),
        salt=rng.choice((b"", b"", b"tenant")),
        is_traced=rng.random() < 0.1,
    )
    ask = MixRequest(prompt, sampling, options, rng.randint(0, 16), leaves, rng.randint(0, 6))
    if ask.is_keyed and rng.random() < 0.2:
        said = generate_plain(place.name, ask.prompt, ask.sampling)[0].token_ids
        edited = tuple(4 if rng.random() < 0.15 else token for token in said if rng.random() > 0.1)
        ask = replace(ask, options=replace(options, prediction=edited))
    return ask


def _make_prompt(rng: random.Random, place: MixTarget, is_vast: bool) -> Any:
    def tokens(size: int) -> list[int]:
        return [rng.randrange(4, place.vocab) for _ in range(size)]

    if place.name == "seq2seq":
        source = tokens(rng.randint(1, 24))
        return source if rng.random() < 0.8 else Seq2Seq(source, [1, *tokens(rng.randint(1, 5))])
    shared = [(7 * i + 3 * rng.randint(0, 1)) % 89 + 4 for i in range(rng.choice((0, 0, 9, 30)))]
    kind = rng.random()
    if kind < 0.25:
        return shared + tokens(rng.randint(1, 4)) * rng.randint(2, 9)
    if is_vast and kind < 0.4:
        return tokens(CONTEXT - rng.randint(1, 12))
    return shared + tokens(rng.choice((1, 2, 5, 17, 40)))


def _make_sampling(rng: random.Random, place: MixTarget) -> Sampling:
    def perhaps(part: float, **given: Any) -> dict[str, Any]:
        return given if rng.random() < part else {}

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(4, place.vocab), rng.randint(least, most)))

    most = rng.choice((1, 2, 7, 16, 24, 40))
    is_greedy = rng.random() < 0.45
    found: dict[str, Any] = {"max_tokens": most, "temperature": 0.0 if is_greedy else rng.choice((0.4, 0.7, 1.0, 1.6))}
    found |= perhaps(0.85, seed=rng.getrandbits(rng.choice((3, 31, 63)))) if not is_greedy else {}
    found |= perhaps(0.25, min_tokens=rng.randint(1, most))
    found |= perhaps(0.25, top_k=rng.choice((1, 3, 20))) | perhaps(0.3, top_p=rng.choice((0.1, 0.6, 0.95)))
    found |= perhaps(0.15, min_p=rng.choice((0.01, 0.2))) | perhaps(0.1, typical_p=0.8)
    found |= perhaps(0.25, repetition_penalty=rng.choice((0.8, 1.1, 2.0)))
    found |= perhaps(0.2, frequency_penalty=rng.choice((-0.5, 0.3, 1.5))) | perhaps(0.2, presence_penalty=0.7)
    found |= perhaps(0.2, logit_bias={token: rng.uniform(-6, 6) for token in some(1, 5)})
    found |= perhaps(0.15, bad_words=tuple(some(1, 2) for _ in range(rng.randint(1, 6))))
    found |= perhaps(0.06, allowed_token_ids=some(1, 30)) | perhaps(0.15, stop_token_ids=some(1, 3))
    found |= perhaps(0.4, ignore_eos=True) | perhaps(0.3, logprobs=rng.randint(0, 4))
    found |= perhaps(0.1, prompt_logprobs=rng.randint(0, 2)) | perhaps(0.15, n=rng.randint(2, 3))
    if place.is_text:
        found |= perhaps(0.25, stop=tuple(_make_string(rng) for _ in range(rng.randint(1, 3))))
        found |= perhaps(0.15, grammar=_make_grammar(rng))
    return Sampling(**found)


def _make_string(rng: random.Random) -> str:
    return "".join(chr(rng.randrange(34, 127)) for _ in range(rng.choice((1, 1, 2))))


def _make_grammar(rng: random.Random) -> Grammar:
    kind = rng.randrange(4)
    if kind == 0:
        return Grammar.regex(
            rng.choice(("[a-f]{3,12}", "(foo|bar|barn)+;", "[0-9]{2}-[0-9]{2}", "a*b*c*", "[^a]{1,30}"))
        )
    if kind == 1:
        return Grammar.choice(["yes", "no", "maybe", "maybe-not", "y"])
    if kind == 2:
        return Grammar.json_schema(make_schema(rng) | TIGHT)
    return Grammar.lark('start: item ("," item)*\nitem: /[a-z]{1,3}/ | "(" start ")"')


@lru_cache(maxsize=4096)
def _generate_plain_cached(kind: str, key: str) -> list[Completion]:
    prompt, sampling = _REQUESTS_BY_KEY[key]
    return get_mix_target(kind).plain.generate([prompt], [sampling])


_REQUESTS_BY_KEY: dict[str, tuple[Any, Sampling]] = {}  # by how they are written: neither can be hashed


def generate_plain(kind: str, prompt: Any, sampling: Sampling) -> list[Completion]:
    """Decode one request without drafts, with enough memory."""
    key = f"{prompt!r} {sampling!r}"
    _REQUESTS_BY_KEY[key] = (prompt, sampling)
    return _generate_plain_cached(kind, key)


def run_mix(kind: str, drafter: str, mix: RequestMix, verify: str = "auto") -> MixOutcome:
    """Run a mix under a drafter, in the engine that the mix describes."""
    place = get_mix_target(kind)
    return run_mix_on(create_llm(place, drafter, mix, verify), place, mix)


def create_llm(place: MixTarget, drafter: str, mix: RequestMix, verify: str = "auto") -> LLM:
    """Create the LLM of a target and a drafter, with the memory of a mix."""
    other = place.plain.with_drafter(None)
    other.limits = mix.limits
    llm = other.with_drafter(place.make(drafter, mix.num_tokens), verify=verify)
    lengths: dict[str, DraftLengthPolicy] = {
        "fixed": FixedLengthPolicy(),
        "restless": RandomLengthPolicy(mix.seed),
        "adaptive": AdaptiveLengthPolicy(),
    }
    llm.engine.length_policy = lengths[mix.lengths]
    scheduler = llm.engine.scheduler
    scheduler.limits = replace(scheduler.limits, max_chunk=mix.max_chunk)
    return llm


def run_mix_on(llm: LLM, place: MixTarget, mix: RequestMix) -> MixOutcome:
    """Run all requests of a mix. Faults are sentences; an empty list is a pass."""
    outcome = MixOutcome()
    began = [(ask, llm.prepare(ask.prompt, ask.sampling, ask.options)) for ask in mix.asks]
    with _inject_failures(llm, mix.failing):
        _run_steps(llm, mix, began, outcome)
    for ask, transcripts in began:
        expected = generate_plain(place.name, ask.prompt, ask.sampling) if _is_coupled(llm.rule, ask) else None
        for i, transcript in enumerate(transcripts):
            done = transcript.deltas[-1].completion if transcript.deltas else None
            fault = _find_fault(transcript, done, None if expected is None else expected[i], place.is_exact)
            if fault:
                outcome.faults.append(f"{fault}; sample {i} of {ask}")
            elif done is not None:
                _count(outcome.seen, ask, done, expected is not None)
    outcome.faults += find_leaks(llm)
    outcome.seen["preempted"] += llm.engine.scheduler.num_preempted
    return outcome


def _is_coupled(rule: Rule | None, ask: MixRequest) -> bool:
    """True if its tokens equal those of plain decoding one by one, and not only in distribution."""
    return ask.sampling.is_greedy or (ask.is_keyed and (rule is None or rule.is_reproducible))


@contextmanager
def _inject_failures(llm: LLM, passes: frozenset[int]) -> Iterator[None]:
    """Make the target raise in these passes, half of them after the pass."""
    own, count = llm.target.forward, 0

    def forward(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count in passes and count % 2:
            raise InjectedError
        found = own(*args, **options)
        if count in passes:
            raise InjectedError
        return found

    llm.target.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del llm.target.forward


def _run_steps(
    llm: LLM, mix: RequestMix, began: Sequence[tuple[MixRequest, list[Transcript]]], outcome: MixOutcome
) -> None:
    engine, step = llm.engine, 0
    waiting = sorted(began, key=lambda pair: pair[0].arrives)
    live: list[tuple[MixRequest, list[Transcript], int]] = []
    while waiting or live:
        while waiting and (waiting[0][0].arrives <= step or not live):
            ask, transcripts = waiting.pop(0)
            for transcript in transcripts:
                engine.add(transcript)
            live.append((ask, transcripts, step))
        try:
            engine.step()
        except InjectedError:
            engine.recover()
            outcome.seen["recovered"] += 1
        for ask, transcripts, since in live:
            if ask.leaves is not None:
                _abort_due(llm, ask, transcripts, step - since)
        live = [entry for entry in live if not all(t.is_finished for t in entry[1])]
        step += 1
        if step > MOST_STEPS:
            outcome.faults.append(f"{len(live)} requests had not ended after {step} steps")
            return


def _abort_due(llm: LLM, ask: MixRequest, transcripts: Sequence[Transcript], steps: int) -> None:
    for transcript in transcripts:
        is_due = transcript.num_tokens >= ask.leaves if ask.leaves else steps >= ask.patience
        if is_due and not transcript.is_finished:
            llm.engine.abort(transcript.request)


def _find_fault(
    transcript: Transcript, done: Completion | None, wanted: Completion | None, is_exact: bool
) -> str | None:
    if done is None:
        return "no completion"
    if done.finish_reason == "error" and (wanted is None or wanted.finish_reason != "error"):
        return None if wanted is None and _may_fail(transcript.request) else f"an error: {done.error}"
    if "".join(delta.text for delta in transcript.deltas) != done.text:
        return "the pieces are not the text"
    if [token for delta in transcript.deltas for token in delta.token_ids] != done.token_ids:
        return "the tokens of the pieces are not those of the text"
    count, most = len(done.token_ids), transcript.request.spec.sampling.max_tokens
    if count != done.stats.num_tokens or count > most:
        return f"{done.stats.num_tokens} tokens counted, {count} there"
    return None if wanted is None else describe_difference(done, wanted, is_exact)


def _may_fail(request: Request) -> bool:
    """Allowed ids and a grammar may leave nothing to sample; so may bad words."""
    sampling = request.spec.sampling
    return sampling.grammar is not None or sampling.allowed_token_ids is not None


def describe_difference(done: Completion, wanted: Completion, is_exact: bool) -> str | None:
    """Describe how a completion differs from plain decoding; an aborted one may be a prefix of it."""
    count = len(done.token_ids)
    ends = (done.finish_reason, done.stop_reason, done.error)
    # a pass without a distribution commits nothing, so a draft before it may cost the text its last tokens
    is_part = done.finish_reason in ("abort", "error")
    if done.token_ids != wanted.token_ids[: count if is_part else None]:
        return f"{done.token_ids}, plain decoding has {wanted.token_ids}"
    if not is_part and done.text != wanted.text:
        return f"{done.text!r}, plain decoding has {wanted.text!r}"
    if done.finish_reason != "abort" and ends != (wanted.finish_reason, wanted.stop_reason, wanted.error):
        return f"ended by {ends}, plain decoding by {(wanted.finish_reason, wanted.stop_reason, wanted.error)}"
    for name in ("logprobs", "prompt_logprobs"):
        mine, theirs = getattr(done, name), getattr(wanted, name)
        if is_part:  # of a prompt that may have been read in part
            theirs = theirs and theirs[: len(mine or []) if name == "prompt_logprobs" else count]
        if (mine is None) != (theirs is None) or not _are_alike(mine or [], theirs or [], is_exact):
            return f"{name} {mine}, plain decoding has {theirs}"
    return None


def _are_alike(mine: Sequence[Any], theirs: Sequence[Any], is_exact: bool) -> bool:
    if is_exact:
        return list(mine) == list(theirs)
    if len(mine) != len(theirs):
        return False
    for one, other in zip(mine, theirs, strict=True):
        if (one is None) != (other is None):
            return False
        if one is not None and (
            one.token_id != other.token_id
            or abs(one.logprob - other.logprob) > ROUNDING
            or abs(one.raw_logprob - other.raw_logprob) > ROUNDING
        ):
            return False
    return True


def _count(seen: Counter[str], ask: MixRequest, done: Completion, is_compared: bool) -> None:
    seen[done.finish_reason] += 1
    seen["compared"] += is_compared
    seen["tokens"] += len(done.token_ids)
    seen["accepted"] += done.stats.num_accepted
    seen["rejected"] += done.stats.num_drafted - done.stats.num_accepted
    seen["grammars"] += ask.sampling.grammar is not None


def find_leaks(llm: LLM) -> list[str]:
    """List requests, pages and drafter state that are left after the run, and failures of the drafter."""
    engine, found = llm.engine, []
    allocator = engine.scheduler.allocator
    if engine.has_work or engine.transcripts:
        found.append("requests are left")
    if allocator.num_used or allocator.num_available != allocator.num_pages - 1:
        found.append(f"{allocator.num_used} pages are still used, {allocator.num_available} available")
    engine.scheduler.check_integrity()
    failures = {kind: count for kind, count in engine.drafter.failures.items() if kind != "slow"}  # a busy machine
    if failures:
        found.append(f"the drafter failed: {failures}")
    return found
