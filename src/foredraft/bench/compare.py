"""The same weights and the same prompts through several programs in one run, in turn, prompt by prompt.

A program that cannot be had, or fails, is a line of the result; it never ends the run.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from foredraft.bench.flatness import REPEATS, Cost
from foredraft.bench.methods import PLAIN
from foredraft.bench.participants import OURS, Participant
from foredraft.bench.questions import Conversation, Question
from foredraft.bench.resident import PeerError, Resident

LOADING, ANSWERING = 1800.0, 900.0  # seconds; a first load may compile
Status = Literal["ok", "failed", "absent"]


@dataclass(frozen=True)
class Answer:
    """One prompt through one mode of one program."""

    tokens: tuple[int, ...]
    seconds: float
    passes: int  # of the target


@dataclass
class Contender:
    """One mode of one program, and how it went."""

    participant: Participant
    mode: str
    status: Status = "ok"
    reason: str = ""  # why it is not ok
    answers: list[Answer] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.participant.program} {self.mode} ({self.participant.weights})"

    def fail(self, reason: str, status: Status = "failed") -> None:
        self.status, self.reason, self.answers = status, reason, []


@dataclass(frozen=True)
class Row:
    """One mode of one program over all prompts. Where it is not ok there are no figures."""

    program: str
    mode: str
    weights: str
    group: str
    status: Status
    reason: str
    version: str
    tokens_per_second: float | None = None
    over_ours: float | None = None  # median over prompts of the time of our plain decoding over its own
    acceptance_length: float | None = None
    identical: int | None = None  # texts that are those of our plain decoding of the same weights
    prompts: int = 0


@dataclass(frozen=True)
class Settings:
    """What every program is told alike."""

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
    def load(self) -> dict[str, Any]:
        names = ("model", "draft", "dtype", "threads", "context", "scratch", "draft_tokens", "lookup")
        return {name: getattr(self, name) for name in names}

    @property
    def generate(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("max_tokens", "draft_tokens", "lookup")}


@dataclass
class Comparison:
    """One run."""

    settings: Settings
    contenders: list[Contender]
    step: Callable[[str], None]
    versions: dict[str, str] = field(default_factory=dict)  # program -> version
    costs: dict[str, list[Cost]] = field(default_factory=dict)  # "program (weights)" -> passes
    too_long: list[str] = field(default_factory=list)
    _residents: dict[int, Resident] = field(default_factory=dict)  # by participant's place
    _places: list[Participant] = field(default_factory=list)

    @classmethod
    def of(cls, participants: Sequence[Participant], settings: Settings, step: Callable[[str], None]) -> "Comparison":
        contenders = [Contender(p, mode) for p in participants for mode in p.modes]
        return cls(settings, contenders, step, _places=list(participants))

    def run(self, questions: Sequence[Question], tokenizer: Any, verify_rows: Sequence[int], context: int) -> None:
        with ExitStack() as stack:
            for place, participant in enumerate(self._places):
                self._start(place, participant, stack)
            conversations = [Conversation(tokenizer) for _ in questions]
            if questions:
                self._warm_up(Conversation(tokenizer).ask(questions[0].turns[0]))
            for number, (question, conversation) in enumerate(zip(questions, conversations, strict=True)):
                self._discuss(number, question, conversation, tokenizer)
            if verify_rows:
                self._verify(verify_rows, context, len(tokenizer))

    def _alive(self) -> list[Contender]:
        return [contender for contender in self.contenders if contender.status == "ok"]

    def _of(self, participant: Participant) -> list[Contender]:
        return [contender for contender in self.contenders if contender.participant is participant]

    def _start(self, place: int, participant: Participant, stack: ExitStack) -> None:
        self.step(f"loading {participant.program} ({participant.weights})")
        python = participant.python_path
        if python is None or not python.exists():
            absent = "not given" if python is None else f"{python} does not exist"
            for contender in self._of(participant):
                contender.fail(absent, "absent")
            return
        try:
            resident = stack.enter_context(Resident(python, participant.script, self.settings.threads))
            answer = resident.ask("load", LOADING, **(self.settings.load | participant.job))
        except PeerError as error:
            for contender in self._of(participant):
                contender.fail(str(error))
            return
        self._residents[place] = resident
        self.versions[participant.program] = answer["version"]

    def _generate(self, contender: Contender, prompt: list[int]) -> Answer | None:
        """None where it failed, which takes it out of the run."""
        resident = self._residents[self._places.index(contender.participant)]
        self.step(contender.label)
        try:
            answer = resident.ask("generate", ANSWERING, mode=contender.mode, prompt=prompt, **self.settings.generate)
        except PeerError as error:
            contender.fail(str(error))
            return None
        return Answer(tuple(answer["tokens"]), answer["seconds"], answer["passes"])

    def _warm_up(self, prompt: list[int]) -> None:
        for contender in self._alive():
            self._generate(contender, prompt[-(self.settings.context - self.settings.max_tokens) :])

    def _discuss(self, number: int, question: Question, conversation: Conversation, tokenizer: Any) -> None:
        for turn, text in enumerate(question.turns):
            prompt, alive = conversation.ask(text), self._alive()
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
            said = next((c.answers[-1].tokens for c in self.contenders if c.answers), ())
            conversation.answer(said, tokenizer.decode(said))

    def _verify(self, rows: Sequence[int], context: int, vocabulary: int) -> None:
        tokens = [(7919 * i + 13) % vocabulary for i in range(context)]
        for place, participant in enumerate(self._places):
            if not participant.times_verification or not any(c.status == "ok" for c in self._of(participant)):
                continue
            label = f"{participant.program} ({participant.weights})"
            self.step(f"cost of verification, {label}")
            try:
                answer = self._residents[place].ask(
                    "verify", ANSWERING, rows=list(rows), context=tokens, repeats=REPEATS
                )  # fmt: skip
            except PeerError:
                continue  # some programs cannot; the table has no line of theirs then
            seconds = {int(count): value for count, value in answer["seconds"].items()}
            self.costs[label] = [Cost(count, value, value / seconds[1]) for count, value in seconds.items()]

    def rows(self) -> list[Row]:
        return [self._row(contender) for contender in self.contenders]

    def _row(self, contender: Contender) -> Row:
        participant, answers = contender.participant, contender.answers
        base = Row(
            participant.program, contender.mode, participant.weights, participant.group, contender.status,
            contender.reason, self.versions.get(participant.program, ""),
        )  # fmt: skip
        if contender.status != "ok" or not answers:
            return base
        ours = self._reference(participant.group)
        tokens, passes = sum(len(a.tokens) for a in answers), sum(a.passes for a in answers)
        pairs = list(zip(answers, ours, strict=True)) if ours else []
        is_same_weights = participant.weights == participant.group
        return Row(
            **{name: getattr(base, name) for name in ("program", "mode", "weights", "group", "status", "reason")},
            version=base.version,
            tokens_per_second=tokens / sum(a.seconds for a in answers),
            over_ours=statistics.median(b.seconds / a.seconds for a, b in pairs) if pairs else None,
            acceptance_length=tokens / passes if passes else None,
            identical=sum(a.tokens == b.tokens for a, b in pairs) if pairs and is_same_weights else None,
            prompts=len(answers),
        )

    def _reference(self, group: str) -> list[Answer]:
        """Our plain decoding of the group."""
        for contender in self.contenders:
            participant = contender.participant
            if (participant.program, participant.group, contender.mode) == (OURS, group, PLAIN):
                return contender.answers
        return []
