"""Models, prompts and sizes of a measurement, shared by the claims of one command."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foredraft import zoo
from foredraft.bench import methods, report
from foredraft.bench.grow import grow_to
from foredraft.bench.latency import LatencyOutcome, LatencyRow, build_rows, measure
from foredraft.bench.questions import Question, load_questions
from foredraft.drafter_factory import DrafterFactory
from foredraft.drafters.checkpoint_folders import recognise
from foredraft.drafters.registry import load_methods
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.reproduce.narrow_features import NarrowFeatures
from foredraft.reproduce.noisy_draft import write_noisy_target
from foredraft.sampling.params import Sampling
from foredraft.verification.rule import Rule

GROWN_PARAMETERS, QUICK_PARAMETERS = 430_000_000, 24_000_000
MAX_KV_TOKENS, KV_MARGIN = 4096, 128  # of one engine; drafts need room beyond the context
CACHED_AFTER = 4  # output tokens after which a prompt is in the prefix cache, with its draft KV
NOISE_SIZES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)  # over the standard deviation of the weights
TARGET_NOTE = "target "  # beginning of the notes that describe a target
GREEDY, SAMPLED = "greedy", "T = 1"
MODES = {GREEDY: Sampling(temperature=0.0, ignore_eos=True), SAMPLED: Sampling(temperature=1.0, ignore_eos=True)}


@dataclass(frozen=True)
class ReproduceOptions:
    """Options of `foredraft reproduce`.

    Attributes:
        model: folder or hub id of the target; None = the built-in target, grown where the claim needs a large one.
        spec_model: folder or hub id of the draft model or head; None = those of the built-in target.
        heads: folder of Medusa heads for the number of heads; None = the built-in ones.
        undistilled: folder of a draft model that was trained without the target.
        questions: question file or name of a built-in workload; None = "code".
        is_quick: few prompts, short outputs, a small target: the figures mean nothing.
    """

    model: str | None = None
    spec_model: str | None = None
    heads: str | None = None
    undistilled: str | None = None
    questions: Path | None = None
    is_quick: bool = False

    def get_extra(self, name: str) -> str | None:
        """Return the folder that one claim alone reads."""
        return {"heads": self.heads, "undistilled": self.undistilled}[name]


def is_workload(options: ReproduceOptions) -> bool:
    """Return whether the prompts are those of a built-in workload."""
    return options.questions is None or not options.questions.exists()


def load_target(model: str) -> LLM:
    """Load a target without a drafter.

    Some claims have twenty engines on the same weights, so each gets the KV memory of one request only.
    """
    llm = LLM(model, None)
    llm.limits = replace(llm.limits, kv_tokens=min(llm.context_length, MAX_KV_TOKENS) + KV_MARGIN)
    return llm.with_drafter(None)


class Workbench:
    """Models and sizes of the measurements of one command. Models are loaded when a claim first needs them.

    Args:
        options: options of the command.
        folder: temporary folder for grown and noisy models.
        on_progress: called with a title before every step.
    """

    def __init__(
        self, options: ReproduceOptions, folder: Path, on_progress: Callable[[str], None] = lambda title: None
    ) -> None:
        self.options = options
        self.folder = folder
        self.on_progress = on_progress

    def choose(self, full: Any, quick: Any) -> Any:
        """Return the setting of a whole measurement, or that of a quick one."""
        return quick if self.options.is_quick else full

    @cached_property
    def built_in(self) -> LLM:
        """The built-in target."""
        return load_target(zoo.DEFAULT_TARGET)

    @cached_property
    def grown(self) -> LLM:
        """The built-in target grown until the time of a pass is that of reading its weights."""
        folder = self.folder / "grown"
        self.on_progress("growing the built-in target")
        grow_to(None, self.choose(GROWN_PARAMETERS, QUICK_PARAMETERS), folder)
        return load_target(str(folder))

    @cached_property
    def given(self) -> LLM | None:
        """The target of --model."""
        return None if self.options.model is None else load_target(self.options.model)

    @property
    def large_target(self) -> LLM:
        """The target of --model, else the grown one."""
        return self.given or self.grown

    @property
    def small_target(self) -> LLM:
        """The target of --model, else the built-in one."""
        return self.given or self.built_in

    def describe_target(self, llm: LLM) -> str:
        """Describe a target in a note, with its size and origin."""
        dtype = str(llm.target.model.dtype).removeprefix("torch.")
        text = f"{TARGET_NOTE}{report.get_model_name(llm)}: {llm.num_parameters / 1e6:.1f}M parameters, {dtype}"
        return "; ".join([text, *report.list_origin_notes(llm.target.model.config)])

    def describe_runs(self, prompts: Sequence[Question], tokens: int) -> str:
        """Describe the conditions of `run` in a note."""
        source = f"workload {self.options.questions or 'code'}" if is_workload(self.options) else "given questions"
        return (
            f"{len(prompts)} prompts ({source}), {tokens} output tokens each; all settings in turn, prompt by prompt; "
            "prompts are computed before the time counts"
        )

    def find_noisy_target(self, size: float) -> str:
        """Return the folder of the built-in target with noise; it is written at the first call."""
        folder = self.folder / f"noise-{size}"
        if not folder.exists():
            self.on_progress(f"adding noise {size}")
            write_noisy_target(size, folder)
        return str(folder)

    def name_draft(self) -> str:
        """Return the method of --spec-model; "draft_model" without one."""
        return "draft_model" if self.options.spec_model is None else recognise(self.options.spec_model)[0]

    def add_drafter(self, llm: LLM, text: str, model: str | None = None, rule: Rule | None = None) -> LLM:
        """Return an LLM with the drafter that `text` describes, as in `foredraft bench latency --methods`.

        Args:
            llm: target.
            text: method with its draft length and settings.
            model: folder of the draft model or head; None = --spec-model, else the built-in one.
            rule: verification rule; None = chosen for every request.

        Raises:
            ForedraftError: the method is unknown, or has no model for this target.
        """
        spec = self.build_spec(llm, text, model)
        length = spec.get("num_speculative_tokens", "auto")
        grown = vars(self).get("grown")  # without growing it
        has_grown_weights = grown is not None and llm.target.model is grown.target.model
        drafter = self._make_small_drafter(spec, length) if has_grown_weights else None
        if drafter is None:
            return llm.with_drafter(spec, length, verify=rule)
        return llm.with_drafter(drafter, verify=rule)  # made for `length`: a bound would count the nodes of its tree

    def build_spec(self, llm: LLM, text: str, model: str | None = None) -> dict[str, Any]:
        """Build the specification of a drafter, in vLLM's keys. Arguments: as `add_drafter`."""
        parsed = methods.parse(text, list(load_methods()))
        given = model or self.options.spec_model
        [method] = methods.attach_models([parsed], llm.target.model.config, given, llm.is_builtin)
        return dict(method.spec)

    def _make_small_drafter(self, spec: dict[str, Any], length: Any) -> NarrowFeatures | None:
        """Make the drafter of the small target, for use beside the grown one; None = it reads no hidden states."""
        small = self.built_in
        if not isinstance(length, int):
            return None
        factory = DrafterFactory(small.target, small.tokenizer, small.fused, small.builtin)
        drafter, _ = factory.make(spec, length)
        if drafter is None or not drafter.spec.hidden_layers:
            return None
        return NarrowFeatures(drafter, small.target.hidden_size)

    def load_prompts(self, full: int, quick: int = 2) -> list[Question]:
        """Load the prompts of a measurement; of a conversation only the first turn.

        Raises:
            ForedraftError: the file of --questions cannot be read.
        """
        questions = load_questions(self.options.questions, self.choose(full, quick))
        return [replace(question, turns=question.turns[:1]) for question in questions]

    def run(
        self, generators: Mapping[str, LLM], mode: str, prompts: Sequence[Question], tokens: int, rounds: int = 1
    ) -> LatencyOutcome:
        """Generate with all of `generators`, prompt by prompt in turn.

        Args:
            generators: label -> LLM; `methods.PLAIN` must be among the labels.
            mode: GREEDY or SAMPLED.
            prompts: prompts.
            tokens: output tokens of a prompt.
            rounds: repetitions of every prompt.

        Raises:
            ForedraftError: the target has no tokenizer, a method failed, or no prompt fits the context.
        """
        plain = generators[methods.PLAIN]
        if plain.tokenizer is None:
            raise ForedraftError(f"{plain.target.name} has no tokenizer; put tokenizer.json beside its weights")
        outcome = measure(
            generators, prompts, plain.tokenizer, plain.context_length, replace(MODES[mode], max_tokens=tokens), rounds,
            lambda name: self.on_progress(f"{mode}: {name}"), CACHED_AFTER,
        )  # fmt: skip
        if not outcome.runs[methods.PLAIN]:
            raise ForedraftError("no prompt fits the model's context; give shorter ones with --questions")
        return outcome

    def run_rows(
        self, generators: Mapping[str, LLM], mode: str, prompts: Sequence[Question], tokens: int
    ) -> list[LatencyRow]:
        """Run and return one row per label, as `run`."""
        sampling = replace(MODES[mode], max_tokens=tokens)
        return build_rows(self.run(generators, mode, prompts, tokens), sampling)
