"""The same weights and the same prompts through several programs in one run, in turn, prompt by prompt.

A program that cannot be had, or fails, is a line of the result; it never ends the run.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from foredraft.bench.methods import PLAIN
from foredraft.bench.participants import FOREDRAFT, Participant
from foredraft.bench.questions import PromptBuilder, Question
from foredraft.bench.subprocess_peer import PeerError, SubprocessPeer
from foredraft.bench.verify_cost import REPEATS, VerifyCost

LOAD_TIMEOUT, ANSWER_TIMEOUT = 1800.0, 900.0  # seconds; a first load may compile
ModeStatus = Literal["ok", "failed", "absent"]


@dataclass(frozen=True)
class PeerAnswer:
    """One prompt through one mode of one program."""

    tokens: tuple[int, ...]
    seconds: float
    passes: int  # of the target


@dataclass
class ComparedMode:
    """One mode of one program, and how it went."""

    participant: Participant
    mode: str
    status: ModeStatus = "ok"
    reason: str = ""  # why it is not ok
    answers: list[PeerAnswer] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.participant.program} {self.mode} ({self.participant.weights})"

    def mark_failed(self, reason: str, status: ModeStatus = "failed") -> None:
        self.status, self.reason, self.answers = status, reason, []


@dataclass(frozen=True)
class ComparisonRow:
    """One mode of one program over all prompts. Where it is not ok there are no figures."""

    program: str
    mode: str
    weights: str
    group: str
    status: ModeStatus
    reason: str
    version: str
    tokens_per_second: float | None = None
    over_ours: float | None = None  # median over prompts of the time of our plain decoding over its own
    acceptance_length: float | None = None
    identical: int | None = None  # texts that are those of our plain decoding of the same weights
    prompts: int = 0


@dataclass(frozen=True)
class PeerSettings:
    """Settings that every program gets alike."""

    model: str  # a folder
    draft: str | None
    dtype: str
    threads: int
    context: int
    scratch: str  # a folder for what a program has to convert
    draft_tokens: int
    lookup: tuple[int, int]  # draft length, longest match
    max_tokens: int

    @property
    def load_arguments(self) -> dict[str, Any]:
        names = ("model", "draft", "dtype", "threads", "context", "scratch", "draft_tokens", "lookup")
        return {name: getattr(self, name) for name in names}

    @property
    def generate_arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("max_tokens", "draft_tokens", "lookup")}


@dataclass
class Comparison:
    """One run."""

    settings: PeerSettings
    compared_modes: list[ComparedMode]
    on_progress: Callable[[str], None]
    versions: dict[str, str] = field(default_factory=dict)  # program -> version
    costs: dict[str, list[VerifyCost]] = field(default_factory=dict)  # "program (weights)" -> passes
    too_long: list[str] = field(default_factory=list)
    _peers: dict[int, SubprocessPeer] = field(default_factory=dict)  # by participant's place
    _participants: list[Participant] = field(default_factory=list)

    @classmethod
    def from_participants(
        cls, participants: Sequence[Participant], settings: PeerSettings, on_progress: Callable[[str], None]
    ) -> "Comparison":
        contenders = [ComparedMode(p, mode) for p in participants for mode in p.modes]
        return cls(settings, contenders, on_progress, _participants=list(participants))

    def run(self, questions: Sequence[Question], tokenizer: Any, verify_rows: Sequence[int], context: int) -> None:
        with ExitStack() as stack:
            for place, participant in enumerate(self._participants):
                self._start_peer(place, participant, stack)
            conversations = [PromptBuilder(tokenizer) for _ in questions]
            if questions:
                self._warm_up(PromptBuilder(tokenizer).add_user_turn(questions[0].turns[0]))
            for number, (question, conversation) in enumerate(zip(questions, conversations, strict=True)):
                self._run_question(number, question, conversation, tokenizer)
            if verify_rows:
                self._measure_verify_cost(verify_rows, context, len(tokenizer))

    def _list_active(self) -> list[ComparedMode]:
        return [contender for contender in self.compared_modes if contender.status == "ok"]

    def _list_modes(self, participant: Participant) -> list[ComparedMode]:
        return [contender for contender in self.compared_modes if contender.participant is participant]

    def _start_peer(self, index: int, participant: Participant, stack: ExitStack) -> None:
        self.on_progress(f"loading {participant.program} ({participant.weights})")
        python = participant.python_path
        if python is None or not python.exists():
            absent = "not given" if python is None else f"{python} does not exist"
            for contender in self._list_modes(participant):
                contender.mark_failed(absent, "absent")
            return
        try:
            resident = stack.enter_context(SubprocessPeer(python, participant.script, self.settings.threads))
            answer = resident.call("load", LOAD_TIMEOUT, **(self.settings.load_arguments | participant.load_arguments))
        except PeerError as error:
            for contender in self._list_modes(participant):
                contender.mark_failed(str(error))
            return
        self._peers[index] = resident
        self.versions[participant.program] = answer["version"]

    def _generate(self, contender: ComparedMode, prompt: list[int]) -> PeerAnswer | None:
        """None where it failed, which takes it out of the run."""
        resident = self._peers[self._participants.index(contender.participant)]
        self.on_progress(contender.label)
        try:
            answer = resident.call(
                "generate", ANSWER_TIMEOUT, mode=contender.mode, prompt=prompt, **self.settings.generate_arguments
            )
        except PeerError as error:
            contender.mark_failed(str(error))
            return None
        return PeerAnswer(tuple(answer["tokens"]), answer["seconds"], answer["passes"])

    def _warm_up(self, prompt: list[int]) -> None:
        for contender in self._list_active():
            self._generate(contender, prompt[-(self.settings.context - self.settings.max_tokens) :])

    def _run_question(self, number: int, question: Question, conversation: PromptBuilder, tokenizer: Any) -> None:
        for turn, text in enumerate(question.turns):
            prompt, alive = conversation.add_user_turn(text), self._list_active()
            if len(prompt) + self.settings.max_tokens > self.settings.context:
                self.too_long.append(question.name)
                return
            if not alive:
                return
            shift = (number + turn) % len(alive)
            for contender in alive[shift:] + alive[:shift]:
                answer = self._generate(contender, prompt)
                if answer is not None:
                    contender.answers.append(answer)
            # later turns follow one answer, that of our plain decoding, so that all are asked the same
            said = next((c.answers[-1].tokens for c in self.compared_modes if c.answers), ())
            conversation.add_answer(said, tokenizer.decode(said))

    def _measure_verify_cost(self, rows: Sequence[int], context: int, vocabulary: int) -> None:
        tokens = [(7919 * i + 13) % vocabulary for i in range(context)]
        for place, participant in enumerate(self._participants):
            if not participant.has_verify_op or not any(c.status == "ok" for c in self._list_modes(participant)):
                continue
            label = f"{participant.program} ({participant.weights})"
            self.on_progress(f"cost of verification, {label}")
            try:
                answer = self._peers[place].call(
                    "verify", ANSWER_TIMEOUT, rows=list(rows), context=tokens, repeats=REPEATS
                )  # fmt: skip
            except PeerError:
                continue  # some programs cannot; the table has no line of theirs then
            seconds = {int(count): value for count, value in answer["seconds"].items()}
            self.costs[label] = [VerifyCost(count, value, value / seconds[1]) for count, value in seconds.items()]

    def build_rows(self) -> list[ComparisonRow]:
        return [self._build_row(contender) for contender in self.compared_modes]

    def _build_row(self, contender: ComparedMode) -> ComparisonRow:
        participant, answers = contender.participant, contender.answers
        base = ComparisonRow(
            participant.program, contender.mode, participant.weights, participant.group, contender.status,
            contender.reason, self.versions.get(participant.program, ""),
        )  # fmt: skip
        if contender.status != "ok" or not answers:
            return base
        ours = self._find_reference(participant.group)
        tokens, passes = sum(len(a.tokens) for a in answers), sum(a.passes for a in answers)
        pairs = list(zip(answers, ours, strict=True)) if ours else []
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
        """Our plain decoding of the group."""
        for contender in self.compared_modes:
            participant = contender.participant
            if (participant.program, participant.group, contender.mode) == (FOREDRAFT, group, PLAIN):
                return contender.answers
        return []
