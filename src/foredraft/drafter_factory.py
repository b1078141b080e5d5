"""Factory of drafters: turns the `drafter` argument of a user into a drafter of one target, in a sandbox."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from foredraft import zoo
from foredraft.drafters.aggressive.predicted_outputs import PredictedOutputDrafter
from foredraft.drafters.ensemble.fallback import FallbackDrafter
from foredraft.drafters.interface import Drafter
from foredraft.drafters.registry import DrafterContext, load_methods, parse_config, resolve_method, uses_model
from foredraft.drafters.user_spec import MethodSpec, UserDrafterSpec
from foredraft.engine.sandbox import SandboxedDrafter, validate_drafter
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
        method, model = parsed.method, parsed.model
        try:
            module, implied = resolve_method(method)
            if model is not None and not uses_model(module):
                raise ForedraftError(f"the method {method} drafts from the tokens alone; leave its model {model!r} out")
            if parsed.loaded_model is not None and not getattr(module, "ACCEPTS_LOADED_MODEL", False):
                raise ForedraftError(f"the method {method} takes a folder or hub id as its model, not a loaded one")
            context = self._build_context(module.METHOD, parsed, num_tokens)
            drafter: Drafter = module.create(parse_config(module, implied | parsed.options), context)
            return drafter, str(getattr(drafter, "title", method))
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
        return FallbackDrafter(sandbox(PredictedOutputDrafter(MAX_PREDICTION_TOKENS), "prediction"), main)

    def _build_context(self, method: str, parsed: MethodSpec, num_tokens: int) -> DrafterContext:
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
            builtin_drafters={
                name: path for name in load_methods() if (path := self._find_builtin_drafter(name)) is not None
            },
            sandbox=partial(
                _wrap_in_sandbox, size, self.target.num_layers
            ),  # a partial of a function, which keeps no LLM alive
        )

    def _find_builtin_drafter(self, method: str) -> str | None:
        return None if self.builtin is None else zoo.find_drafter(method, self.builtin)


def _wrap_in_sandbox(vocab_size: int, num_layers: int, drafter: Drafter, name: str) -> SandboxedDrafter:
    return SandboxedDrafter(drafter, vocab_size, name=name, num_layers=num_layers)
