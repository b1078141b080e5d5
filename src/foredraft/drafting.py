"""Drafters of one target: made from what a user writes, each behind a guard."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from foredraft import zoo
from foredraft.drafters.base import Context, Drafter, configured, meant_by, methods, reads_model
from foredraft.drafters.overlay import Overlay
from foredraft.drafters.prediction import Prediction
from foredraft.drafters.spec import DrafterSpec, Spec
from foredraft.engine.guard import Guard, checked
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel

PREDICTED_TOKENS = 15  # of a draft from a request's prediction: sixteen rows, which one pass takes well


@dataclass(frozen=True)
class DrafterFactory:
    """Makes the drafters of one target."""

    target: HFModel
    tokenizer: Any | None
    fused: bool  # run recognised draft models as native code
    builtin: str | None  # name of the target among the built-in ones

    def make(self, spec: DrafterSpec, num_tokens: int) -> tuple[Drafter | None, str]:
        """The drafter and its name; `num_tokens` is the longest draft. Raises ForedraftError."""
        if spec is None or spec == "none":
            return None, "none"
        if not isinstance(spec, (str, dict)):
            return checked(spec, self.target.num_layers), type(spec).__name__
        given = Spec.read(spec)
        method, model = given.method, given.model
        try:
            module, implied = meant_by(method)
            if model is not None and not reads_model(module):
                raise ForedraftError(f"the method {method} drafts from the text alone; leave its model {model!r} out")
            if given.loaded is not None and not getattr(module, "TAKES_LOADED", False):
                raise ForedraftError(f"the method {method} takes a folder or hub id as its model, not a loaded one")
            context = self._context(module.METHOD, given, num_tokens)
            made: Drafter = module.create(configured(module, implied | given.options), context)
            return made, str(getattr(made, "title", method))
        except ForedraftError:
            raise
        except (TypeError, ValueError) as error:
            raise ForedraftError(str(error)) from error

    def with_predictions(self, drafter: Drafter | None, name: str) -> Drafter:
        """The drafter behind drafts from what requests say their output will be; each fails alone."""
        guarded = partial(_guarded, self.target.vocab_size, self.target.num_layers)
        main = None if drafter is None else guarded(drafter, name)
        return Overlay(guarded(Prediction(PREDICTED_TOKENS), "prediction"), main)

    def _context(self, method: str, given: Spec, num_tokens: int) -> Context:
        if num_tokens < 1:
            raise ForedraftError(
                f"num_speculative_tokens must be at least 1, got {num_tokens}; use drafter=None for none"
            )
        size = self.target.vocab_size
        return Context(
            vocab_size=size,
            target=self.target,
            num_tokens=num_tokens,
            model=given.model,
            loaded=given.loaded,
            tokenizer=self.tokenizer,
            target_name=self.target.name,
            target_parameters=self.target.num_parameters,
            dtype=self.target.model.dtype,
            device=self.target.device,
            fused=self.fused,
            builtin=self._builtin_drafter(method),
            builtins={name: path for name in methods() if (path := self._builtin_drafter(name)) is not None},
            guarded=partial(_guarded, size, self.target.num_layers),  # holds no LLM
        )

    def _builtin_drafter(self, method: str) -> str | None:
        return None if self.builtin is None else zoo.builtin_drafter(method, self.builtin)


def _guarded(vocab_size: int, num_layers: int, drafter: Drafter, name: str) -> Guard:
    return Guard(drafter, vocab_size, name=name, num_layers=num_layers)
