"""Declaration of a drafting method: one frozen `Method` in the folder of the method, with everything that others need.

`registry.py` finds the methods. Readers, exporters, trainers, programs and tests get what they need from a `Method`, so
none of them has a list of methods. docs/how-to/write-a-drafter.md is the tutorial.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from foredraft.checkpoints.formats import CheckpointFormat
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.counterpart import Counterparts
from foredraft.drafters.interface import Drafter
from foredraft.drafters.trainee import Trainee
from foredraft.models.hf import HFModel
from foredraft.verification.rule import Rule

VARIANT_BRANCHING = (3, 2, 1, 1, 2, 1, 1, 1)  # children by depth of variants with a fixed tree
DEFAULT_AUTO_TOKENS = 8  # longest draft in tokens with an adaptive length (`--spec-tokens auto`)


@dataclass(frozen=True)
class DrafterContext:
    """Target, user options and environment for `Method.create` and `Method.from_checkpoint`."""

    vocab_size: int  # V of the target's logits; every q has this width
    target: HFModel | None = None  # for drafters that use its embedding, output matrix or layer sizes; None in tests
    num_speculative_tokens: int = 5  # K: largest depth of a draft; of a chain, its largest number of tokens
    model: str | None = None  # folder or hub id of the draft model or head, as the user gave it
    loaded_model: Any = None  # loaded transformers model in place of `model`
    tokenizer: Any = None  # tokenizer of the target; None if its folder has none
    target_name: str = "target"  # folder or hub id of the target, for messages
    target_parameters: int = 0  # number of parameters of the target
    dtype: torch.dtype = torch.float32  # dtype for the drafter's network: that of the target
    device: torch.device = torch.device("cpu")  # device of the target  # noqa: RUF009 (immutable)
    fused: bool = True  # run draft models as native CPU code if their architecture is supported
    builtin_drafter: str | None = None  # folder of this method's drafter for the built-in target; None = there is none
    # such folders of all methods, by method; those of further members of one method by their numbered names
    builtin_drafters: Mapping[str, str] = field(default_factory=dict)
    # Wraps a member of an ensemble, given with its name, in a sandbox of its own, so that members fail independently.
    sandbox: "Callable[[Drafter, str], Drafter]" = lambda drafter, name: drafter


@dataclass(frozen=True)
class Training:
    """Training of a method's weights: by gradients, or by counting tokens.

    Attributes:
        config: frozen dataclass of the settings. For training by gradients it has a static method
            `read_shape(network)`. That method returns the settings that the sizes of a network determine, such as the
            number of layers. Training that starts from an existing drafter must not change them.
        create_trainee: makes the drafter in training, in float32 on the target's device. Arguments: settings, target,
            and the drafter to start from. The latter is a checkpoint, the folder of a whole model, or None = new
            weights. It raises ForedraftError for invalid settings, or a drafter that cannot be trained.
        learn: trains by counting, and writes the folder of the drafter. Arguments: settings, documents (token ids [n]
            each), target and folder.
    """

    config: type
    create_trainee: Callable[[Any, HFModel, Any], Trainee] | None = None
    learn: Callable[[Any, Sequence[NDArray[Any]], HFModel, Path], None] | None = None

    def __post_init__(self) -> None:
        if (self.create_trainee is None) == (self.learn is None):
            raise ValueError("a method is trained with create_trainee or with learn; give one of them")


@dataclass(frozen=True)
class HeadRecipe:
    """Arguments of `foredraft train` for a drafter of a built-in target. The zoo sets the tokens of a step.

    Attributes:
        steps: number of updates.
        settings: settings of the training.
        learning_rate: highest learning rate.
        optimizer: name of the optimizer.
        folder: name of the drafter's folder; "" = the first of `BuiltIn.folders`.
        boost: folders of the built-in draft models that draft beside this one; it learns what they miss.
        further_steps: number of updates of a second run from the result of the first, with the learning rate raised and
            lowered again; 0 = none.
    """

    steps: int
    settings: Mapping[str, str] = field(default_factory=dict)
    learning_rate: float = 2e-3
    optimizer: str = "muon"
    folder: str = ""
    boost: tuple[str, ...] = ()
    further_steps: int = 0


@dataclass(frozen=True)
class BuiltIn:
    """Use of a method beside the built-in targets.

    Attributes:
        folders: name of the drafter's folder in `foredraft/zoo`, by built-in target.
        recipes: training by `foredraft zoo train`, by built-in target; without one the zoo trains the drafter in
            another way, or there is none.
        further: names of the folders that further members of an ensemble draft with, in order, by built-in target.
    """

    folders: Mapping[str, str] = field(default_factory=dict)
    recipes: Mapping[str, HeadRecipe] = field(default_factory=dict)
    further: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def find_recipe_folder(self, target: str) -> str:
        """Return the name of the folder that the recipe for a built-in target fills."""
        return self.recipes[target].folder or self.folders[target]

    def list_folders(self, target: str) -> list[str]:
        """Return the names of all folders for a built-in target, in the order of the members of an ensemble."""
        return [self.folders[target], *self.further.get(target, ())] if target in self.folders else []


@dataclass(frozen=True)
class Variant:
    """Small configuration with which the tests that cover all methods run this one.

    Attributes:
        name: what distinguishes the variant; "" = the plain one.
        options: returns the options of `Method.config` for a draft length.
        training: settings with which a head for a tiny target is fitted first; None = the drafter has no head.
        learning_rate: of that fit.
        is_chain: True if every draft is a chain, which the rule `block` can verify.
        has_own_parts: True if the variant runs code that the plain one does not, such as another cache or tree.
        setup: name of what the tests put beside the target (`tests/support/method_cases.py`); "" = nothing.
    """

    name: str = ""
    options: Callable[[int], Mapping[str, Any]] = lambda num_tokens: {}
    training: Mapping[str, Any] | None = None
    learning_rate: float = 1e-2
    is_chain: bool = True
    has_own_parts: bool = False
    setup: str = ""


@dataclass(frozen=True)
class Method:
    """A drafting method.

    Attributes:
        name: the name that users write.
        config: frozen dataclass of the options.
        create: makes the drafter from an instance of `config` and a context; None = `from_checkpoint` makes it, from
            the head that the user named, the built-in one or that of the target. `creation.create_drafter` calls
            either.
        uses_model: True if the method takes the option `model`: a draft model, a head or another trained file.
        accepts_loaded_model: True if `model` may be a loaded transformers model.
        from_checkpoint: makes the drafter from the options, a loaded checkpoint and a context; None = `create` is the
            only way to make it.
        read_from_target: reads the head that the target's own folder holds, if the user names none; None = the user has
            to name one, unless it is built in. It raises ForedraftError if the target has none.
        check_options: raises ForedraftError for invalid options before a checkpoint is loaded. Arguments: options and
            `num_speculative_tokens`. None = `from_checkpoint` checks them alone.
        auto_rank: rank in the method `auto`: a number, or a function of the context. `auto` uses the method with the
            highest rank of those that read tokens alone, and of those with a model. A model that the user gave takes
            precedence over ranks. None = `auto` does not choose this method by itself.
        auto_tokens: longest draft in tokens with an adaptive length (`--spec-tokens auto`), in any method.
        default_ranks: preference as the default method, by built-in target; None = all other targets. The highest is
            used. A method for all other targets needs no model.
        parse_name: returns the options that another name of this method implies, None for all other names.
        configure: parses the options if `config` alone does not describe them.
        option_choices: returns the valid texts of an option, by its name.
        option_aliases: options by other names, those of vLLM's speculative_config and of the authors' code. Each
            returns the options for a value.
        checkpoint: how its drafters are stored; None = it has no files, or reads them itself.
        training: how its drafters are trained; None = they are not.
        built_in: use beside the built-in targets.
        reads_tokens_alone: True if the drafters read committed token ids and nothing else of the target, so that they
            can draft inside another engine (`foredraft.vllm`).
        make_rule: returns the rule that verifies its drafts if neither the user nor the request names one, from an
            instance of `config`. Such a method drafts alone, in no ensemble. None = the rule follows from the request.
        counterparts: how other engines draft with this method, by engine; `foredraft.handover` writes the commands.
        variants: configurations for the tests that cover all methods.
    """

    name: str
    config: type
    create: Callable[[Any, DrafterContext], Drafter] | None = None
    uses_model: bool = True
    accepts_loaded_model: bool = False
    from_checkpoint: Callable[[Any, Checkpoint, DrafterContext], Drafter] | None = None
    read_from_target: Callable[[DrafterContext], Checkpoint] | None = None
    check_options: Callable[[Any, int], object] | None = None
    auto_rank: float | Callable[[DrafterContext], float | None] | None = None
    auto_tokens: int = DEFAULT_AUTO_TOKENS
    default_ranks: Mapping[str | None, float] = field(default_factory=dict)
    parse_name: Callable[[str], dict[str, Any] | None] | None = None
    configure: Callable[[dict[str, Any]], Any] | None = None
    option_choices: Mapping[str, Callable[[], Sequence[str]]] = field(default_factory=dict)
    option_aliases: Mapping[str, Callable[[Any], Mapping[str, Any]]] = field(default_factory=dict)
    checkpoint: CheckpointFormat | None = None
    training: Training | None = None
    built_in: BuiltIn = BuiltIn()
    reads_tokens_alone: bool = False
    make_rule: Callable[[Any], Rule] | None = None
    counterparts: Counterparts = field(default_factory=dict)
    variants: tuple[Variant, ...] = (Variant(),)

    def __post_init__(self) -> None:
        if self.create is None and self.from_checkpoint is None:
            raise ValueError("a method makes its drafters with create or with from_checkpoint; give one of them")

    def get_auto_rank(self, context: DrafterContext) -> float | None:
        """Return the rank among the methods that `auto` chooses from; None = never."""
        return self.auto_rank(context) if callable(self.auto_rank) else self.auto_rank
