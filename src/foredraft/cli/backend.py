"""What the commands need from the rest of the library, loaded only when they ask: importing torch takes seconds."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from foredraft import zoo
from foredraft.cli.options import AUTO, NONE, PLUS, ModelOptions
from foredraft.cli.shell import UsageError
from foredraft.completion import Completion, Delta
from foredraft.errors import suggest

if TYPE_CHECKING:
    from foredraft.llm import LLM, MemoryLimits
    from foredraft.sampling import Sampling


WITHOUT_DRAFT = "ngram"  # the method that needs nothing but the prompt


CliPrompt = str | list[int]  # text, or the token ids of a rendered chat


class Generator(Protocol):
    """An LLM, as the commands see it."""

    @property
    def drafter_name(self) -> str: ...

    def generate(self, prompts: "Sequence[CliPrompt]", sampling: "Sampling") -> list[Completion]: ...

    def stream(self, prompts: "Sequence[CliPrompt]", sampling: "Sampling") -> Iterator[Delta]: ...

    def with_drafter(self, drafter: dict[str, Any] | None) -> "Generator": ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def context_length(self) -> int: ...

    def encode_chat(self, messages: Sequence[dict[str, str]], *, chat_template: str | None = None) -> list[int]: ...


@dataclass(frozen=True)
class TrainingOptions:
    """The options of `foredraft zoo train`; None is the recipe's own."""

    device: str = "cpu"
    sources: Path | None = None
    threads: int | None = None
    tokens: int | None = None
    batch_tokens: int | None = None
    finish: bool = False


@dataclass(frozen=True)
class Choices:
    """The words the options take."""

    methods: tuple[str, ...]
    rules: tuple[str, ...]
    lossy: frozenset[str]  # the rules that change the text
    dtypes: tuple[str, ...]
    text_only: frozenset[str] = frozenset()  # the methods that read no model of their own
    vocabs: tuple[str, ...] = ()  # the words of --spec-vocab
    translating: frozenset[str] = frozenset()  # the methods that take them

    def knows(self, method: str) -> bool:
        """A method, none, `auto`, or several methods as a+b."""
        return method in (NONE, AUTO) or all(part in self.methods for part in method.split(PLUS))

    def is_text_only(self, method: str) -> bool:
        return all(part in self.text_only for part in method.split(PLUS))

    def check(self, options: ModelOptions) -> None:
        """Raises UsageError for a word that nobody knows, and for settings of a drafter where none is wanted."""
        asked = options.methods
        for name in asked:
            if not self.knows(name):
                known = ", ".join([NONE, *self.methods])
                near = suggest(name, [NONE, AUTO, *self.methods])
                raise UsageError(f"unknown method {name!r}; use one of: {known}; {AUTO}, or several as a{PLUS}b{near}")
        for value, names, what in [
            (options.verify, self.rules, "verification rule"),
            (options.dtype, self.dtypes, "dtype"),
        ]:
            if value not in names:
                raise UsageError(f"unknown {what} {value!r}; use one of: {', '.join(names)}")
        if options.spec_vocab is not None:
            self._check_vocab(options.spec_vocab, asked)
        drafting = (options.spec_model, options.draft_length, options.spec_option)
        if asked == [NONE] and any(option is not None for option in drafting):
            raise UsageError(
                "--spec-method none drafts nothing; leave --spec-model, --spec-tokens and --spec-option out"
            )

    def _check_vocab(self, vocab: str, asked: Sequence[str]) -> None:
        if vocab not in self.vocabs:
            raise UsageError(f"unknown --spec-vocab {vocab!r}; use one of: {', '.join(self.vocabs)}")
        for name in asked:
            if self.translating.isdisjoint(name.split(PLUS)):
                raise UsageError(_no_vocab(name, self.translating))


def _no_vocab(method: str, translating: Collection[str]) -> str:
    return (
        f"--spec-vocab is for a draft model with a tokenizer of its own, and --spec-method {method} has none; "
        f"leave it out, or use --spec-method {', '.join(sorted(translating))}"
    )


class Backend:
    """The library. A test passes another object of this shape as the context object of the command line."""

    def choices(self) -> Choices:
        from foredraft.drafters.base import methods, reads_model
        from foredraft.drafters.foreign import words
        from foredraft.models.load import DTYPES
        from foredraft.verify import LOSSY, RULES

        known = methods()
        text_only = frozenset(name for name, module in known.items() if not reads_model(module))
        rules, dtypes = ("auto", *RULES), ("auto", *DTYPES)
        return Choices(tuple(sorted(known)), rules, LOSSY, dtypes, text_only, words(), _translating())

    def method_of(self, drafter: str) -> str:
        """What drafts with a folder or hub id, by what lies there. Raises ForedraftError where nothing does."""
        from foredraft.checkpoints.read import recognise

        return recognise(drafter)[0]

    def load(self, options: ModelOptions, method: str) -> Generator:
        """The target with a drafter. Raises ForedraftError."""
        return load_llm(options, method)

    def with_method(self, llm: Generator, options: ModelOptions, method: str) -> Generator:
        """The same target weights with another drafter. Raises ForedraftError where that method cannot be had."""
        return llm.with_drafter(drafter_spec(options, method))

    def zoo(self) -> dict[str, Path]:
        """The built-in models of this installation: name -> folder."""
        from foredraft import zoo

        return {name: zoo.path(name) for name in zoo.names()}

    def train(
        self, out: Path, options: TrainingOptions, report: Callable[[str, int, int, float], None],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Train the built-in models into a folder; a run that stopped goes on."""
        import torch

        from foredraft.zoo.build import build_all
        from foredraft.zoo.recipe import DRAFT, TARGET

        if options.threads is not None:
            torch.set_num_threads(options.threads)
        target = TARGET.scaled(options.tokens, options.batch_tokens, options.device)
        drafts = None if options.tokens is None else options.tokens * DRAFT.tokens // TARGET.tokens
        draft = DRAFT.scaled(drafts, options.batch_tokens, options.device)
        build_all(
            out, options.device, target, draft, root=options.sources, report=report, say=say, finish=options.finish
        )

    def install(self, out: Path) -> None:
        """Make what was trained the built-in models of this installation."""
        from foredraft import zoo
        from foredraft.zoo.build import install

        install(out, Path(zoo.__path__[0]))


def default_of(model: str | None, choices: Choices) -> str:
    """The method if none is given: the best one of a built-in target, else the one that needs only the prompt."""
    builtin = zoo.target_name(model)
    return (None if builtin is None else zoo.drafter_of(builtin, choices.methods)) or WITHOUT_DRAFT


def single_method(options: ModelOptions, backend: Backend, user: str) -> str:
    """The one drafting method of a command; `user` names the command in errors. Raises UsageError."""
    backend.choices().check(options)
    asked = options.methods
    if len(asked) > 1:
        raise UsageError(f"{user} drafts with one method; give one --spec-method")
    if asked:
        return asked[0]
    if options.spec_model:
        return backend.method_of(options.spec_model)
    return default_of(options.model, backend.choices())


def load_llm(options: ModelOptions, method: str, limits: "MemoryLimits | None" = None) -> "LLM":
    """The target with a drafter. Raises ForedraftError."""
    from foredraft import LLM

    hush()
    return LLM(
        options.model or "builtin",
        drafter_spec(options, method),
        dtype=options.dtype,
        device=options.device,
        verify=options.verify,
        fused=False if options.no_fused else None,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
        limits=limits,
    )


def _translating() -> frozenset[str]:
    """The methods whose options say how to draft in another vocabulary."""
    from foredraft.drafters.base import methods

    return frozenset(name for name, module in methods().items() if hasattr(module.Config, "vocab"))


def hush() -> None:
    """Our own bar and our own one line say what is going on, a hub that cannot be reached included."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    logging.getLogger("foredraft.llm").setLevel(logging.ERROR)  # its hint names LLM.chat; generate's own names --chat


def drafter_spec(options: ModelOptions, method: str) -> dict[str, Any] | None:
    """The drafter in the words of vLLM's speculative_config; None for plain decoding."""
    if method == NONE:
        return None
    if options.spec_vocab is not None and method not in (translating := _translating()):
        raise UsageError(_no_vocab(method, translating))
    spec = {
        "method": method,
        "model": options.spec_model,
        "num_speculative_tokens": options.draft_length,
        "quantization": options.spec_quantization,
        "vocab": options.spec_vocab,
    }
    return {name: value for name, value in spec.items() if value is not None} | options.method_settings
