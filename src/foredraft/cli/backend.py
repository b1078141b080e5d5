"""The library as the commands use it, imported on first use: importing torch takes seconds."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from foredraft import zoo
from foredraft.cli.options import AUTO, METHOD_SEPARATOR, NONE, ModelOptions
from foredraft.cli.shell import UsageError
from foredraft.errors import suggest
from foredraft.outputs import Completion, Delta

if TYPE_CHECKING:
    from foredraft.llm import LLM, MemoryLimits
    from foredraft.sampling.params import Sampling


PROMPT_ONLY_METHOD = "ngram"  # the method that needs nothing but the prompt


CliPrompt = str | list[int]  # text, or the token ids of a rendered chat


class CliGenerator(Protocol):
    """An LLM, as the commands see it."""

    @property
    def drafter_name(self) -> str: ...

    def generate(self, prompts: "Sequence[CliPrompt]", sampling: "Sampling") -> list[Completion]: ...

    def stream(self, prompts: "Sequence[CliPrompt]", sampling: "Sampling") -> Iterator[Delta]: ...

    def with_drafter(self, drafter: dict[str, Any] | None) -> "CliGenerator": ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def context_length(self) -> int: ...

    def encode_chat(self, messages: Sequence[dict[str, str]], *, chat_template: str | None = None) -> list[int]: ...


@dataclass(frozen=True)
class ZooTrainingOptions:
    """The options of `foredraft zoo train`; None is the recipe's own."""

    device: str = "cpu"
    sources: Path | None = None
    threads: int | None = None
    tokens: int | None = None
    batch_tokens: int | None = None
    finish: bool = False


@dataclass(frozen=True)
class CliChoices:
    """The words the options take."""

    methods: tuple[str, ...]
    rules: tuple[str, ...]
    lossy_rules: frozenset[str]  # the rules that change the text
    dtypes: tuple[str, ...]
    text_only_methods: frozenset[str] = frozenset()  # the methods that read no model of their own
    vocab_modes: tuple[str, ...] = ()  # the words of --spec-vocab
    cross_vocab_methods: frozenset[str] = frozenset()  # the methods that take them

    def has_method(self, method: str) -> bool:
        """A method, none, `auto`, or several methods as a+b."""
        return method in (NONE, AUTO) or all(part in self.methods for part in method.split(METHOD_SEPARATOR))

    def is_text_only(self, method: str) -> bool:
        return all(part in self.text_only_methods for part in method.split(METHOD_SEPARATOR))

    def check(self, options: ModelOptions) -> None:
        """Check names and settings. Raises UsageError for unknown names, and for drafter settings without a drafter."""
        asked = options.methods
        for name in asked:
            if not self.has_method(name):
                known = ", ".join([NONE, *self.methods])
                near = suggest(name, [NONE, AUTO, *self.methods])
                raise UsageError(
                    f"unknown method {name!r}; use one of: {known}; {AUTO}, or several as a{METHOD_SEPARATOR}b{near}"
                )
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

    def _check_vocab(self, vocab: str, methods: Sequence[str]) -> None:
        if vocab not in self.vocab_modes:
            raise UsageError(f"unknown --spec-vocab {vocab!r}; use one of: {', '.join(self.vocab_modes)}")
        for name in methods:
            if self.cross_vocab_methods.isdisjoint(name.split(METHOD_SEPARATOR)):
                raise UsageError(_explain_no_vocab(name, self.cross_vocab_methods))


def _explain_no_vocab(method: str, cross_vocab_methods: Collection[str]) -> str:
    return (
        f"--spec-vocab is for a draft model with a tokenizer of its own, and --spec-method {method} has none; "
        f"leave it out, or use --spec-method {', '.join(sorted(cross_vocab_methods))}"
    )


class CliBackend:
    """The library. A test passes another object of this shape as the context object of the command line."""

    def list_choices(self) -> CliChoices:
        from foredraft.drafters.cross_vocab_select import list_vocab_options
        from foredraft.drafters.registry import load_methods, uses_model
        from foredraft.models.loading import DTYPES
        from foredraft.verification.rules import LOSSY_RULES, RULES

        known = load_methods()
        text_only = frozenset(name for name, module in known.items() if not uses_model(module))
        rules, dtypes = ("auto", *RULES), ("auto", *DTYPES)
        return CliChoices(
            tuple(sorted(known)),
            rules,
            LOSSY_RULES,
            dtypes,
            text_only,
            list_vocab_options(),
            _find_cross_vocab_methods(),
        )

    def find_method(self, drafter: str) -> str:
        """Return the method that drafts with a folder or hub id. Raises ForedraftError if none does."""
        from foredraft.checkpoints.read import recognise

        return recognise(drafter)[0]

    def load(self, options: ModelOptions, method: str) -> CliGenerator:
        """The target with a drafter. Raises ForedraftError."""
        return load_llm(options, method)

    def load_with_method(self, llm: CliGenerator, options: ModelOptions, method: str) -> CliGenerator:
        """The same target weights with another drafter. Raises ForedraftError where that method cannot be had."""
        return llm.with_drafter(build_drafter_spec(options, method))

    def list_zoo(self) -> dict[str, Path]:
        """The built-in models of this installation: name -> folder."""
        from foredraft import zoo

        return {name: zoo.find_folder(name) for name in zoo.list_models()}

    def train(
        self, out: Path, options: ZooTrainingOptions, report: Callable[[str, int, int, float], None],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Train the built-in models into a folder; a run that stopped goes on."""
        import torch

        from foredraft.zoo.build import build_all
        from foredraft.zoo.recipe import DRAFT_RECIPE, TARGET_RECIPE

        if options.threads is not None:
            torch.set_num_threads(options.threads)
        target = TARGET_RECIPE.scale(options.tokens, options.batch_tokens, options.device)
        drafts = (
            None if options.tokens is None else options.tokens * DRAFT_RECIPE.total_tokens // TARGET_RECIPE.total_tokens
        )
        draft = DRAFT_RECIPE.scale(drafts, options.batch_tokens, options.device)
        build_all(
            out, options.device, target, draft, root=options.sources, report=report, log_line=say, finish=options.finish
        )

    def install(self, out: Path) -> None:
        """Make what was trained the built-in models of this installation."""
        from foredraft import zoo
        from foredraft.zoo.build import install

        install(out, Path(zoo.__path__[0]))


def choose_default_method(model: str | None, choices: CliChoices) -> str:
    """The method if none is given: the best one of a built-in target, else the one that needs only the prompt."""
    builtin = zoo.resolve_target(model)
    return (None if builtin is None else zoo.choose_method(builtin, choices.methods)) or PROMPT_ONLY_METHOD


def resolve_single_method(options: ModelOptions, backend: CliBackend, command_name: str) -> str:
    """The one drafting method of a command; `user` names the command in errors. Raises UsageError."""
    backend.list_choices().check(options)
    asked = options.methods
    if len(asked) > 1:
        raise UsageError(f"{command_name} drafts with one method; give one --spec-method")
    if asked:
        return asked[0]
    if options.spec_model:
        return backend.find_method(options.spec_model)
    return choose_default_method(options.model, backend.list_choices())


def load_llm(options: ModelOptions, method: str, limits: "MemoryLimits | None" = None) -> "LLM":
    """The target with a drafter. Raises ForedraftError."""
    from foredraft import LLM

    silence_transformers()
    return LLM(
        options.model or "builtin",
        build_drafter_spec(options, method),
        dtype=options.dtype,
        device=options.device,
        verify=options.verify,
        fused=False if options.no_fused else None,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
        limits=limits,
    )


def _find_cross_vocab_methods() -> frozenset[str]:
    """The methods whose options say how to draft in another vocabulary."""
    from foredraft.drafters.registry import load_methods

    return frozenset(name for name, module in load_methods().items() if hasattr(module.Config, "vocab"))


def silence_transformers() -> None:
    """Our own bar and our own one line say what is going on, a hub that cannot be reached included."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    logging.getLogger("foredraft.llm").setLevel(logging.ERROR)  # its hint names LLM.chat; generate's own names --chat


def build_drafter_spec(options: ModelOptions, method: str) -> dict[str, Any] | None:
    """The drafter in the words of vLLM's speculative_config; None for plain decoding."""
    if method == NONE:
        return None
    if options.spec_vocab is not None and method not in (translating := _find_cross_vocab_methods()):
        raise UsageError(_explain_no_vocab(method, translating))
    spec = {
        "method": method,
        "model": options.spec_model,
        "num_speculative_tokens": options.draft_length,
        "quantization": options.spec_quantization,
        "vocab": options.spec_vocab,
    }
    return {name: value for name, value in spec.items() if value is not None} | options.method_options
