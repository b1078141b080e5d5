"""Factory of drafters: turns the `drafter` argument of a user into a drafter of one target, in a sandbox."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from foredraft import zoo
from foredraft.drafters.aggressive.predicted_outputs import PredictedOutputDrafter, has_prediction
from foredraft.drafters.creation import create_drafter
from foredraft.drafters.ensemble.fallback import FallbackDrafter
from foredraft.drafters.interface import Drafter
from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.registry import load_methods, number_members, parse_config, resolve_method
from foredraft.drafters.user_spec import MethodSpec, UserDrafterSpec
from foredraft.engine.drafter_validation import validate_drafter
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel

MAX_PREDICTION_TOKENS = 15  # longest draft from a prediction: with the root, 16 rows of a forward pass


@dataclass(frozen=True)
class DrafterFactory:
    """Creates the drafters of one target."""

    target: HFModel
    tokenizer: Any | None
    fused: bool  # run recognised draft models as native code
    builtin: str | None  # name of the target if it is built-in

    def make(self, spec: UserDrafterSpec, num_tokens: int) -> tuple[Drafter | None, str]:
        """Return the drafter and its name; (None, "none") for plain decoding.

        Args:
            spec: method name, dict of options, drafter object or None.
            num_tokens: longest draft, in tokens.

        Raises:
            ForedraftError: for an unknown method, invalid options, or a drafter that does not fit the target.
        """
        if spec is None or spec == "none":
            return None, "none"
        if not isinstance(spec, (str, dict)):
            return validate_drafter(spec, self.target.num_layers), type(spec).__name__
        parsed = MethodSpec.parse(spec)
        name, model = parsed.method, parsed.model
        try:
            method, implied = resolve_method(name)
            if model is not None and not method.uses_model:
                raise ForedraftError(f"the method {name} drafts from the tokens alone; leave its model {model!r} out")
            if parsed.loaded_model is not None and not method.accepts_loaded_model:
                raise ForedraftError(f"the method {name} takes a folder or hub id as its model, not a loaded one")
            context = self._build_context(method, parsed, num_tokens)
            drafter = create_drafter(method, parse_config(method, implied | parsed.options), context)
            return drafter, drafter.spec.title or str(name)
        except ForedraftError:
            raise
        except (TypeError, ValueError) as error:
            raise ForedraftError(str(error)) from error

    def with_predictions(self, drafter: Drafter | None, name: str) -> Drafter:
        """Return a drafter that drafts from a request's prediction first, and from `drafter` otherwise.

        Each of the two has its own sandbox, so that a fault of one does not stop the other.
        """
        sandbox = partial(_wrap_in_sandbox, self.target.vocab_size, self.target.num_layers)
        main = None if drafter is None else sandbox(drafter, name)
        predicted = sandbox(PredictedOutputDrafter(MAX_PREDICTION_TOKENS), "prediction")
        return FallbackDrafter(predicted, main, has_prediction)

    def _build_context(self, method: Method, parsed: MethodSpec, num_tokens: int) -> DrafterContext:
        if num_tokens < 1:
            raise ForedraftError(
                f"num_speculative_tokens must be at least 1, got {num_tokens}; use drafter=None for none"
            )
        size = self.target.vocab_size
        return DrafterContext(
            vocab_size=size,
            target=self.target,
            num_speculative_tokens=num_tokens,
            model=parsed.model,
            loaded_model=parsed.loaded_model,
            tokenizer=self.tokenizer,
            target_name=self.target.name,
            target_parameters=self.target.num_parameters,
            dtype=self.target.model.dtype,
            device=self.target.device,
            fused=self.fused,
            builtin_drafter=self._find_builtin_drafter(method),
            builtin_drafters=self._find_builtin_drafters(),
            sandbox=partial(
                _wrap_in_sandbox, size, self.target.num_layers
            ),  # a partial of a function, which keeps no LLM alive
        )

    def _find_builtin_drafters(self) -> dict[str, str]:
        """Return the built-in drafters of all methods, by the names that the members of one method have."""
        found: dict[str, str] = {}
        if self.builtin is None:
            return found
        for name, method in load_methods().items():
            folders = method.built_in.list_folders(self.builtin)
            for member, folder in zip(number_members([name] * len(folders)), folders, strict=True):
                if (path := zoo.find_installed(folder)) is not None:
                    found[member] = path
        return found

    def _find_builtin_drafter(self, method: Method) -> str | None:
        return None if self.builtin is None else zoo.find_drafter(method.built_in.folders, self.builtin)


def find_default_method(target: str | None) -> str | None:
    """Return the default drafting method; None if no preferred method can be used.

    A method with a drafter in the zoo is used only if this installation has its folder.

    Args:
        target: name of a built-in target; None = any other target.
    """
    ranks = {
        name: method.default_ranks[target]
        for name, method in load_methods().items()
        if target in method.default_ranks and (target is None or _is_installed(method, target))
    }
    return max(ranks, key=lambda name: ranks[name], default=None)


def _is_installed(method: Method, target: str) -> bool:
    """Return False if the method's drafter for a built-in target is missing from this installation."""
    folders = method.built_in.folders
    return target not in folders or zoo.find_drafter(folders, target) is not None


def _wrap_in_sandbox(vocab_size: int, num_layers: int, drafter: Drafter, name: str) -> SandboxedDrafter:
    return SandboxedDrafter(drafter, vocab_size, name=name, num_layers=num_layers)
