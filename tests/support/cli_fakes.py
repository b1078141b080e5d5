"""A library that answers at once, for the commands to run against."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from foredraft.cli.backend import CliChoices, ZooTrainingOptions, build_drafter_spec
from foredraft.cli.options import ModelOptions
from foredraft.errors import ForedraftError
from foredraft.outputs import Completion, Delta, Origin, Stats, TokenLogprob
from foredraft.verification.registry import RULES

PIECES: tuple[tuple[str, Origin], ...] = (
    ("\n    return", "accepted"), (" n", "accepted"), (" +", "corrected"), (" é", "bonus"), ("!", "plain"),
)  # fmt: skip
TEXT = "".join(piece for piece, _ in PIECES)
EMPTY_HANDED = "the method draft_model needs a draft: give --spec-model PATH"


@dataclass
class FakeLLM:
    """Completes every prompt with PIECES, two completions at a time interleaved."""

    drafter_name: str
    pieces: tuple[tuple[str, Origin], ...] = PIECES
    verification: str = "match"
    error: str | None = None
    raises: BaseException | None = None
    calls: list[tuple[str, int]] = field(default_factory=list)  # (method, max_tokens), shared by a backend's models
    options: list = field(default_factory=list)  # of the requests of each call, shared by a backend's models

    def generate(self, prompts, sampling, *, options=None):
        done = {d.index: d.completion for d in self.stream(prompts, sampling) if d.completion}
        return [done[i] for i in sorted(done)]

    def stream(self, prompts: Sequence[str], sampling, *, options=None) -> Iterator[Delta]:
        self.calls.append((self.drafter_name, sampling.max_tokens))
        self.options.append(options)
        if self.raises is not None:
            raise self.raises
        last = len(self.pieces) - 1
        for i, (piece, origin) in enumerate(self.pieces):
            for index in range(len(prompts) * sampling.n):
                reason = None if i < last else "error" if self.error else "length"
                completion = self._completion(prompts, sampling, index) if reason else None
                yield Delta(index, piece, (i,), (origin,), (piece,), reason, completion)

    has_chat_template = False
    context_length = 4096

    def encode_chat(self, messages, *, chat_template=None):
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"
        self.calls.append((text, len(messages)))
        return [ord(character) % 50 for character in text]

    def _completion(self, prompts, sampling, index: int) -> Completion:
        ids = list(range(len(self.pieces)))
        entry = TokenLogprob(1, -0.5, float("-inf"), ((1, -0.5),), ((2, float("-inf")),))
        return Completion(
            text="".join(piece for piece, _ in self.pieces),
            token_ids=ids,
            finish_reason="error" if self.error else "length",
            logprobs=None if sampling.logprobs is None else [entry] * len(ids),
            stats=Stats(len(ids), 2, 4, 3, (2, 1), 2, 0.25, 0.5),
            prompt=prompts[index // sampling.n],
            index=index % sampling.n,
            verification=self.verification,
            error=self.error,
        )


TEXT_ONLY = frozenset({"ngram"})


@dataclass
class FakeBackend:
    """The library as the command sees it. `models` gives a method another FakeLLM; `missing` cannot be had."""

    models: dict[str, FakeLLM] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    folders: dict[str, Path] = field(default_factory=dict)
    load_error: Exception | None = None
    calls: list[tuple[str, int]] = field(default_factory=list)
    specs: list[dict | None] = field(default_factory=list)
    options: ModelOptions | None = None
    request_options: list = field(default_factory=list)
    training: ZooTrainingOptions | None = None

    def list_choices(self) -> CliChoices:
        return CliChoices(
            ("draft_model", "ngram"),
            RULES,
            ("auto", "bfloat16", "float32"),
            TEXT_ONLY,
            default_methods={None: "ngram", "builtin": "draft_model"},
        )

    def find_method(self, drafter: str) -> str:
        return "draft_model"

    def load(self, options: ModelOptions, method: str) -> FakeLLM:
        if self.load_error is not None:
            raise self.load_error
        self.options = options
        return self._make(options, method)

    def load_with_method(self, llm: FakeLLM, options: ModelOptions, method: str) -> FakeLLM:
        return self._make(options, method)

    def list_zoo(self) -> dict[str, Path]:
        return self.folders

    def train(self, out: Path, options: ZooTrainingOptions, report, say) -> None:
        self.training = options
        say("5 tokens to train on, 2 held out")
        for step in range(1, 41):
            report("target", step, 40, 1 / step)
        self.calls.append((f"train {out.name} {options.device} {options.sources}", 40))

    def install(self, out: Path) -> tuple[list[str], list[str]]:
        self.calls.append((f"install {out.name}", 0))
        return ["target", "draft"], ["seq2seq"]

    def _make(self, options: ModelOptions, method: str) -> FakeLLM:
        if method in self.missing:
            raise ForedraftError(EMPTY_HANDED)
        self.specs.append(build_drafter_spec(options, method))
        return replace(
            self.models.get(method, FakeLLM(method)),
            drafter_name=method,
            calls=self.calls,
            options=self.request_options,
        )
