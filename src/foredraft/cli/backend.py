"""Functions of the library that the commands call.

The library is imported inside the functions, because importing torch takes seconds. Tests replace `CliBackend`.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from foredraft import zoo
from foredraft.cli.options import AUTO, METHOD_SEPARATOR, NONE, ModelOptions
from foredraft.cli.shell import UsageError
from foredraft.errors import suggest
from foredraft.outputs import Completion, Delta

if TYPE_CHECKING:
    from foredraft.image_prompt import EncodedImagePrompt, ImagePrompt
    from foredraft.llm import LLM, MemoryLimits
    from foredraft.request_options import RequestOptions
    from foredraft.sampling.params import Sampling
    from foredraft.verification.rule import Rule


VOCAB_OPTION = "vocab"  # option of methods that can draft in another vocabulary
ATTRIBUTE_SEPARATOR = ":"  # in package.module:METHOD


CliPrompt: TypeAlias = "str | list[int] | ImagePrompt | EncodedImagePrompt"  # text, a rendered chat, or with images


class CliGenerator(Protocol):
    """The part of `LLM` that the commands use."""

    @property
    def drafter_name(self) -> str: ...

    def generate(self, prompts: "Sequence[CliPrompt]", sampling: "Sampling") -> list[Completion]: ...

    def stream(
        self, prompts: "Sequence[CliPrompt]", sampling: "Sampling", *, options: "Sequence[RequestOptions]"
    ) -> Iterator[Delta]: ...

    def with_drafter(self, drafter: dict[str, Any] | None) -> "CliGenerator": ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def context_length(self) -> int: ...

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, chat_template: str | None = None) -> list[int]: ...

    def encode_image_chat(
        self, messages: Sequence[dict[str, Any]], *, chat_template: str | None = None
    ) -> "EncodedImagePrompt": ...


@dataclass(frozen=True)
class ZooTrainingOptions:
    """Options of `foredraft zoo train`; None = the value of the recipe."""

    device: str = "cpu"
    sources: Path | None = None
    threads: int | None = None
    tokens: int | None = None
    batch_tokens: int | None = None
    finish: bool = False
    is_compiled: bool = False
    with_undistilled: bool = False


@dataclass(frozen=True)
class CliChoices:
    """Valid values of the options that take a name."""

    methods: tuple[str, ...]
    rules: Mapping[str, "Rule"]  # verification rules by name
    dtypes: tuple[str, ...]
    token_only_methods: frozenset[str] = frozenset()  # methods without a draft model or head
    vocab_modes: tuple[str, ...] = ()  # values of --spec-vocab
    cross_vocab_methods: frozenset[str] = frozenset()  # methods that accept --spec-vocab
    default_methods: Mapping[str | None, str] = field(default_factory=dict)  # by built-in target; None = other targets

    def has_method(self, method: str) -> bool:
        """Return whether `method` is a method, `none`, `auto`, several methods as a+b, or package.module:METHOD."""
        return method in (NONE, AUTO) or all(
            part in self.methods or ATTRIBUTE_SEPARATOR in part for part in method.split(METHOD_SEPARATOR)
        )

    def is_token_only(self, method: str) -> bool:
        return all(part in self.token_only_methods for part in method.split(METHOD_SEPARATOR))

    def check(self, options: ModelOptions) -> None:
        """Check names and settings before a model is loaded.

        Raises:
            UsageError: a name is unknown, or drafter settings are given with --spec-method none.
        """
        methods = options.methods
        for name in methods:
            if not self.has_method(name):
                valid_names = ", ".join([NONE, *self.methods])
                near = suggest(name, [NONE, AUTO, *self.methods])
                raise UsageError(
                    f"unknown method {name!r}; use one of: {valid_names}; {AUTO}, several as a{METHOD_SEPARATOR}b, or "
                    f"package.module{ATTRIBUTE_SEPARATOR}METHOD{near}"
                )
        for value, names, kind in [
            (options.verify, (AUTO, *self.rules), "verification rule"),
            (options.dtype, self.dtypes, "dtype"),
        ]:
            if value not in names:
                raise UsageError(f"unknown {kind} {value!r}; use one of: {', '.join(names)}")
        options.find_rule()  # report invalid settings before a model is loaded
        if options.spec_vocab is not None:
            self._check_vocab(options.spec_vocab, methods)
        drafter_settings = (options.spec_model, options.draft_length, options.spec_option)
        if methods == [NONE] and any(option is not None for option in drafter_settings):
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
        f"--spec-vocab is for a draft model with another tokenizer, and --spec-method {method} has none; "
        f"leave it out, or use --spec-method {', '.join(sorted(cross_vocab_methods))}"
    )


class CliBackend:
    """Models and drafters for the commands.

    A test passes a substitute with the same methods as the context object of the command line.
    """

    def list_choices(self) -> CliChoices:
        from foredraft.drafter_factory import find_default_method
        from foredraft.drafters.registry import load_methods
        from foredraft.models.loading import DTYPES
        from foredraft.verification.registry import RULES

        registry = load_methods()
        text_only = frozenset(name for name, method in registry.items() if not method.uses_model)
        return CliChoices(
            tuple(sorted(registry)),
            RULES,
            (AUTO, *DTYPES),
            text_only,
            _list_option_choices(VOCAB_OPTION),
            _find_methods_with_option(VOCAB_OPTION),
            {
                target: method
                for target in (None, *zoo.list_targets())
                if (method := find_default_method(target)) is not None
            },
        )

    def find_method(self, drafter: str) -> str:
        """Return the method that drafts with a folder or hub id. Raises ForedraftError if none does."""
        from foredraft.drafters.checkpoint_folders import recognise

        return recognise(drafter)[0]

    def load(self, options: ModelOptions, method: str) -> CliGenerator:
        """Load the target with a drafter. Raises ForedraftError if that is impossible."""
        return load_llm(options, method)

    def load_with_method(self, llm: CliGenerator, options: ModelOptions, method: str) -> CliGenerator:
        """Return an LLM with the target weights of `llm` and another drafter.

        Args:
            llm: generator whose target is shared.
            options: options of the new drafter.
            method: name of the new drafting method.

        Raises:
            ForedraftError: the method does not work with this target or these options.
        """
        return llm.with_drafter(build_drafter_spec(options, method))

    def list_zoo(self) -> dict[str, Path]:
        """Return the built-in models of this installation: name -> folder."""
        from foredraft import zoo

        return {name: zoo.find_folder(name) for name in zoo.list_models()}

    def train(
        self, out: Path, options: ZooTrainingOptions, report: Callable[[str, int, int, float], None],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Train the built-in models into the folder `out`; an interrupted run is resumed."""
        import torch

        from foredraft.train.freed_memory import keep_freed_memory
        from foredraft.zoo_training.build import build_all
        from foredraft.zoo_training.recipe import DRAFT_RECIPE, TARGET_RECIPE

        if options.threads is not None:
            torch.set_num_threads(options.threads)
        target = TARGET_RECIPE.scale(options.tokens, options.batch_tokens, options.device)
        draft_tokens = (
            None if options.tokens is None else options.tokens * DRAFT_RECIPE.total_tokens // TARGET_RECIPE.total_tokens
        )
        draft = DRAFT_RECIPE.scale(draft_tokens, options.batch_tokens, options.device)
        keep_freed_memory()
        build_all(
            out, options.device, target, draft, root=options.sources, report=report, log_line=say,
            finish=options.finish, is_compiled=options.is_compiled,
            with_undistilled=options.with_undistilled,
        )  # fmt: skip

    def install(self, out: Path) -> tuple[list[str], list[str]]:
        """Replace the built-in models of this installation by the finished models in the folder `out`.

        Returns:
            Names of the models that were replaced, and of those that `out` does not have.
        """
        from foredraft import zoo
        from foredraft.zoo_training.build import install

        return install(out, Path(zoo.__path__[0]))


def choose_default_method(model: str | None, choices: CliChoices) -> str:
    """Return the default method of a target; if a built-in one has none, that of all other targets."""
    defaults = choices.default_methods
    return defaults.get(zoo.resolve_target(model)) or defaults.get(None, NONE)


def find_model_methods(models: Sequence[str], backend: CliBackend) -> str:
    """Return the method of the folders of --spec-model; an ensemble if there are several."""
    return METHOD_SEPARATOR.join(map(backend.find_method, models))


def resolve_single_method(options: ModelOptions, backend: CliBackend, command_name: str) -> str:
    """Return the drafting method of a command that takes only one.

    Args:
        options: options of the command.
        backend: source of the valid names; reads the folder of --spec-model.
        command_name: subject of the error message, such as "a server".

    Raises:
        UsageError: a name or setting is invalid, or several methods are given.
    """
    backend.list_choices().check(options)
    methods = options.methods
    if len(methods) > 1:
        raise UsageError(f"{command_name} drafts with one method; give one --spec-method")
    if methods:
        return methods[0]
    if options.spec_model:
        return find_model_methods(options.spec_model, backend)
    return choose_default_method(options.model, backend.list_choices())


def load_llm(
    options: ModelOptions,
    method: str,
    limits: "MemoryLimits | None" = None,
    lora: str | None = None,
    base: "LLM | None" = None,
) -> "LLM":
    """Load the target with a drafter.

    Args:
        options: of the model and its drafter.
        method: name of the drafting method.
        limits: sizes of KV memory and steps. Default None = the defaults of `LLM`.
        lora: folder of an adapter of the target. Default None.
        base: loaded LLM with whose weights this one shares equal ones. Default None.

    Raises:
        ForedraftError: the model cannot be loaded, or the drafter does not fit it.
    """
    from foredraft.llm import LLM

    silence_transformers()
    return LLM(
        options.model or "builtin",
        build_drafter_spec(options, method),
        dtype=options.dtype,
        device=options.device,
        verify=options.find_rule() or AUTO,
        fused=False if options.no_fused else None,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
        revision=options.revision,
        tokenizer=options.tokenizer,
        limits=limits,
        tensor_parallel_size=options.tensor_parallel_size,
        lora=lora,
        adapters=options.adapter_folders,
        shares_weights_of=base,
        exact=options.exact,
        kv_dtype=options.kv_dtype,
        max_images=options.num_images,
    )


def _find_methods_with_option(option: str) -> frozenset[str]:
    """Return the methods that declare the valid texts of an option."""
    from foredraft.drafters.registry import load_methods

    return frozenset(name for name, method in load_methods().items() if option in method.option_choices)


def _list_option_choices(option: str) -> tuple[str, ...]:
    """Return the valid texts of an option, in the order in which its methods declare them."""
    from foredraft.drafters.registry import load_methods

    choices = [method.option_choices[option]() for method in load_methods().values() if option in method.option_choices]
    return tuple(dict.fromkeys(text for texts in choices for text in texts))


def silence_transformers() -> None:
    """Turn off progress bars and warnings of transformers, the Hub client and `LLM`.

    The commands show their own progress bar, and report an error in one line.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    # The hint of `LLM` names LLM.chat; `foredraft generate` prints its own hint, which names --chat.
    logging.getLogger("foredraft.llm").setLevel(logging.ERROR)


def build_drafter_spec(options: ModelOptions, method: str) -> dict[str, Any] | None:
    """Return the drafter with the keys of vLLM's speculative_config; None for plain decoding."""
    if method == NONE:
        return None
    if options.spec_vocab is not None and method not in (supporting := _find_methods_with_option(VOCAB_OPTION)):
        raise UsageError(_explain_no_vocab(method, supporting))
    spec = {
        "method": method,
        "model": options.draft_models,
        "num_speculative_tokens": options.draft_length or None,  # 0 is an option of the request
        "quantization": options.spec_quantization,
        "dtype": options.spec_dtype,
        "revision": options.spec_revision,
        "max_model_len": options.spec_max_model_len,
        VOCAB_OPTION: options.spec_vocab,
    }
    return {name: value for name, value in spec.items() if value is not None} | options.method_options
