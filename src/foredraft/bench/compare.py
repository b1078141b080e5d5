"""Comparison of several programs on the same weights and prompts.

All programs take turns, prompt by prompt, in rotating order. A program that is absent or fails becomes a row with its
reason; the run goes on without it.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from foredraft.bench.methods import PLAIN
from foredraft.bench.participants import FOREDRAFT, Participant
from foredraft.bench.pass_limits import PassLimits
from foredraft.bench.questions import PromptBuilder, Question
from foredraft.bench.stream_speeds import StreamSpeed, StreamsPlan, compute_speeds, measure_streams
from foredraft.bench.subprocess_peer import PeerError, SubprocessPeer
from foredraft.bench.verify_cost import REPEATS, VerifyCost

LOAD_TIMEOUT = 1800.0  # seconds; a first load may compile
ANSWER_TIMEOUT = 900.0  # seconds for one prompt
VERIFY_TIMEOUT = 7200.0  # seconds for all passes over a context, which another program may take long to read
ModeStatus = Literal["ok", "failed", "absent"]


@dataclass(frozen=True)
class PeerAnswer:
    """Answer of one mode of one program to one prompt."""

    tokens: tuple[int, ...]
    seconds: float
    passes: int  # forward passes of the target


@dataclass
class ComparedMode:
    """One mode of one program: its status and its answers so far."""

    participant: Participant
    mode: str
    status: ModeStatus = "ok"
    reason: str = ""  # why the status is not "ok"
    answers: list[PeerAnswer] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.participant.program} {self.mode} ({self.participant.weights})"

    def mark_failed(self, reason: str, status: ModeStatus = "failed") -> None:
        self.status, self.reason, self.answers = status, reason, []


@dataclass(frozen=True)
class ComparisonRow:
    """Figures of one mode of one program over all prompts; all None unless the status is "ok"."""

    program: str
    mode: str
    weights: str
    group: str
    status: ModeStatus
    reason: str
    version: str
    tokens_per_second: float | None = None
    over_ours: float | None = None  # median over prompts of (time of Foredraft's plain decoding / time of this mode)
    acceptance_length: float | None = None
    identical: int | None = None  # outputs equal to Foredraft's plain decoding of the same weights
    prompts: int = 0


@dataclass(frozen=True)
class PeerSettings:
    """Settings that all programs share."""

    model: str  # folder of the target
    draft: str | None  # folder of the draft model
    dtype: str
    threads: int
    context: int  # tokens of KV memory
    scratch: str  # folder for converted weights
    draft_tokens: int  # draft length with a draft model
    lookup: tuple[int, int]  # prompt lookup: (draft length, longest match), in tokens
    max_tokens: int
    streams: StreamsPlan = field(default_factory=StreamsPlan)  # numbers of streams to measure

    @property
    def load_arguments(self) -> dict[str, Any]:
        names = ("model", "draft", "dtype", "threads", "context", "scratch", "draft_tokens", "lookup")
        return {name: getattr(self, name) for name in names} | {"max_streams": max(1, self.streams.largest)}

    @property
    def generate_arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("max_tokens", "draft_tokens", "lookup")}


@dataclass
class Comparison:
    """One run of a comparison: starts the peers, sends the prompts and collects the answers."""

    settings: PeerSettings
    compared_modes: list[ComparedMode]
    on_progress: Callable[[str], None]
    versions: dict[str, str] = field(default_factory=dict)  # program -> version
    costs: dict[str, list[VerifyCost]] = field(default_factory=dict)  # "program (weights)" -> one entry per row count
    limits: dict[str, list[PassLimits]] = field(default_factory=dict)  # the same -> one entry per moment
    too_long: list[str] = field(default_factory=list)  # questions that exceed the context
    stream_speeds: list[StreamSpeed] = field(default_factory=list)
    stream_failures: dict[str, str] = field(default_factory=dict)  # label of a mode -> reason
    _peers: dict[int, SubprocessPeer] = field(default_factory=dict)  # by index of the participant
    _participants: list[Participant] = field(default_factory=list)

    @classmethod
    def from_participants(
        cls, participants: Sequence[Participant], settings: PeerSettings, on_progress: Callable[[str], None]
    ) -> "Comparison":
        compared_modes = [ComparedMode(p, mode) for p in participants for mode in p.modes]
        return cls(settings, compared_modes, on_progress, _participants=list(participants))

    def run(self, questions: Sequence[Question], tokenizer: Any, verify_rows: Sequence[int], context: int) -> None:
        with ExitStack() as stack:
            for index, participant in enumerate(self._participants):
                self._start_peer(index, participant, stack)
            conversations = [PromptBuilder(tokenizer) for _ in questions]
            if questions:
                self._warm_up(PromptBuilder(tokenizer).add_user_turn(questions[0].turns[0]))
            for number, (question, conversation) in enumerate(zip(questions, conversations, strict=True)):
                self._measure_limits()
                self._run_question(number, question, conversation, tokenizer)
            if verify_rows:
                self._measure_limits()
                self._measure_verify_cost(verify_rows, context, len(tokenizer))
                self._measure_limits()
            if self.settings.streams.counts:
                self._measure_limits()
                self._measure_streams(len(tokenizer))
                self._measure_limits()

    def _list_active(self) -> list[ComparedMode]:
        return [compared_mode for compared_mode in self.compared_modes if compared_mode.status == "ok"]

    def _list_modes(self, participant: Participant) -> list[ComparedMode]:
        return [compared_mode for compared_mode in self.compared_modes if compared_mode.participant is participant]

    def _start_peer(self, index: int, participant: Participant, stack: ExitStack) -> None:
        self.on_progress(f"loading {participant.program} ({participant.weights})")
        python = participant.python_path
        if python is None or not python.exists():
            absent = "not given" if python is None else f"{python} does not exist"
            for compared_mode in self._list_modes(participant):
                compared_mode.mark_failed(absent, "absent")
            return
        try:
            peer = stack.enter_context(SubprocessPeer(python, participant.script, self.settings.threads))
            answer = peer.call("load", LOAD_TIMEOUT, **(self.settings.load_arguments | participant.load_arguments))
        except PeerError as error:
            for compared_mode in self._list_modes(participant):
                compared_mode.mark_failed(str(error))
            return
        self._peers[index] = peer
        self.versions[participant.program] = answer["version"]

    def _generate(self, compared_mode: ComparedMode, prompt: list[int]) -> PeerAnswer | None:
        """Return the answer of a mode, or None if it failed; a failed mode leaves the run."""
        peer = self._peers[self._participants.index(compared_mode.participant)]
        self.on_progress(compared_mode.label)
        try:
            answer = peer.call(
                "generate", ANSWER_TIMEOUT, mode=compared_mode.mode, prompt=prompt, **self.settings.generate_arguments
            )
        except PeerError as error:
            compared_mode.mark_failed(str(error))
            return None
        return PeerAnswer(tuple(answer["tokens"]), answer["seconds"], answer["passes"])

    def _warm_up(self, prompt: list[int]) -> None:
        for compared_mode in self._list_active():
            self._generate(compared_mode, prompt[-(self.settings.context - self.settings.max_tokens) :])

    def _run_question(self, number: int, question: Question, conversation: PromptBuilder, tokenizer: Any) -> None:
        for turn, text in enumerate(question.turns):
            prompt, active = conversation.add_user_turn(text), self._list_active()
            if len(prompt) + self.settings.max_tokens > self.settings.context:
                self.too_long.append(question.name)
                return
            if not active:
                return
            shift = (number + turn) % len(active)
            for compared_mode in active[shift:] + active[:shift]:
                answer = self._generate(compared_mode, prompt)
                if answer is not None:
                    compared_mode.answers.append(answer)
            # Later turns follow the first available answer, normally that of Foredraft's plain decoding: all modes then
            # get the same prompt.
            answer_tokens = next((c.answers[-1].tokens for c in self.compared_modes if c.answers), ())
            conversation.add_answer(answer_tokens, tokenizer.decode(answer_tokens))

    def _call_programs(
        self,
        op: str,
        title: str,
        can_answer: Callable[[Participant], bool],
        arguments: Mapping[str, Any],
        timeout: float = ANSWER_TIMEOUT,
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the label "program (weights)" and the answer of every active program that has this operation."""
        for index, participant in enumerate(self._participants):
            if not can_answer(participant) or not any(c.status == "ok" for c in self._list_modes(participant)):
                continue
            label = f"{participant.program} ({participant.weights})"
            self.on_progress(f"{title}, {label}")
            try:
                yield label, self._peers[index].call(op, timeout, **arguments)
            except PeerError:
                continue  # the program has no row in the table

    def _measure_verify_cost(self, rows: Sequence[int], context: int, vocabulary: int) -> None:
        tokens = [(7919 * i + 13) % vocabulary for i in range(context)]
        arguments = {"rows": list(rows), "context": tokens, "repeats": REPEATS}
        for label, answer in self._call_programs(
            "verify", "cost of verification", lambda participant: participant.has_verify_op, arguments, VERIFY_TIMEOUT
        ):
            seconds = {int(count): value for count, value in answer["seconds"].items()}
            self.costs[label] = [VerifyCost(count, value, value / seconds[1]) for count, value in seconds.items()]

    def _measure_limits(self) -> None:
        """Measure the machine beside every program that can, between the measurements, because its speed changes."""
        for label, answer in self._call_programs(
            "limits", "limits of the machine", lambda participant: participant.has_limits_op, {}
        ):
            self.limits.setdefault(label, []).append(PassLimits(**answer))

    def _measure_streams(self, vocab_size: int) -> None:
        """Measure plain decoding with several streams in every program that decodes plainly."""
        modes = {c.label: c for c in self._list_active() if c.mode == PLAIN}

        def decode(label: str, prompts: list[list[int]]) -> float | None:
            self.on_progress(f"{len(prompts)} streams, {label}")
            peer = self._peers[self._participants.index(modes[label].participant)]
            try:
                answer = peer.call("streams", ANSWER_TIMEOUT, prompts=prompts, max_tokens=self.settings.max_tokens)
            except PeerError as error:
                self.stream_failures[label] = str(error)
                return None
            return float(answer["seconds"])

        times = measure_streams(self.settings.streams, list(modes), vocab_size, decode)
        ours = {c.participant.group: label for label, c in modes.items() if c.participant.program == FOREDRAFT}
        self.stream_speeds = compute_speeds(
            times,
            {label: (c.participant.program, c.participant.weights) for label, c in modes.items()},
            {label: ours.get(c.participant.group, "") for label, c in modes.items()},
            self.settings.max_tokens,
        )

    def build_rows(self) -> list[ComparisonRow]:
        return [self._build_row(compared_mode) for compared_mode in self.compared_modes]

    def _build_row(self, compared_mode: ComparedMode) -> ComparisonRow:
        participant, answers = compared_mode.participant, compared_mode.answers
        base = ComparisonRow(
            participant.program, compared_mode.mode, participant.weights, participant.group, compared_mode.status,
            compared_mode.reason, self.versions.get(participant.program, ""),
        )  # fmt: skip
        if compared_mode.status != "ok" or not answers:
            return base
        references = self._find_reference(participant.group)
        tokens, passes = sum(len(a.tokens) for a in answers), sum(a.passes for a in answers)
        pairs = list(zip(answers, references, strict=True)) if references else []
        is_same_weights = participant.weights == participant.group
        return ComparisonRow(
            **{name: getattr(base, name) for name in ("program", "mode", "weights", "group", "status", "reason")},
            version=base.version,
            tokens_per_second=tokens / sum(a.seconds for a in answers),
            over_ours=statistics.median(b.seconds / a.seconds for a, b in pairs) if pairs else None,
            acceptance_length=tokens / passes if passes else None,
            identical=sum(a.tokens == b.tokens for a, b in pairs) if pairs and is_same_weights else None,
            prompts=len(answers),
        )

    def _find_reference(self, group: str) -> list[PeerAnswer]:
        """Return the answers of Foredraft's plain decoding on the weights of the group."""
        for compared_mode in self.compared_modes:
            participant = compared_mode.participant
            if (participant.program, participant.group, compared_mode.mode) == (FOREDRAFT, group, PLAIN):
                return compared_mode.answers
        return []
