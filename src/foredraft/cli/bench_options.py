"""The options of `foredraft bench`, in the words of `foredraft generate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.shell import UsageError

if TYPE_CHECKING:
    from foredraft.bench.load_report import LoadBenchPlan as LoadPlan
    from foredraft.bench.micro import KernelBenchPlan
    from foredraft.bench.report import ReportOutputs
    from foredraft.sampling.params import Sampling


def _make_option(help: str, *names: str, panel: str, low: float | None = None, high: float | None = None) -> Any:  # noqa: A002
    # typer's own word is `help`
    return typer.Option(*names, help=help, rich_help_panel=panel, min=low, max=high)


@dataclass(frozen=True)
class BenchOptions:
    """Options of every measurement."""

    model: Annotated[
        str | None, _make_option("Folder or Hub id of the target; the built-in model if not given.", panel="Model")
    ] = None
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Methods, by commas: ngram:8 drafts 8 tokens, further settings follow as key=value, e.g. "
            "draft_model:2:model=PATH. Not given: all there are.",
            rich_help_panel="Model",
            metavar="METHOD[:K],...",
        ),
    ] = None
    spec_model: Annotated[
        str | None, _make_option("Folder or Hub id of the draft model, for every method asked for.", panel="Model")
    ] = None
    dtype: Annotated[str, _make_option("auto, bfloat16, float16, float32 or float64.", panel="Model")] = "auto"
    threads: Annotated[
        int | None, _make_option("CPU threads; torch's own number if not given.", panel="Model", low=1)
    ] = None
    no_fused: Annotated[
        bool, _make_option("Run the model's own modules, not native code, on CPU.", "--no-fused", panel="Model")
    ] = False
    prompts: Annotated[
        int | None,
        _make_option("How many; 20 built-in ones, or all of --questions, if not given.", panel="Prompts", low=0),
    ] = None
    questions: Annotated[
        Path | None,
        _make_option(
            'JSONL of {"turns": ["...", ...]}, as Spec-Bench and MT-bench; or a built-in set by name: code, editing, '
            "logs, prose, summaries, answers, chat, or for an encoder-decoder corrections.",
            panel="Prompts",
        ),
    ] = None
    max_tokens: Annotated[int, _make_option("Longest output.", panel="Prompts", low=1)] = 128
    verify_cost: Annotated[
        str | None,
        _make_option(
            "Time a target pass over so many tokens, e.g. 1,2,4,5,8,16; --prompts 0: only that.", panel="Cost"
        ),
    ] = None
    context: Annotated[int, _make_option("Tokens before those of --verify-cost.", panel="Cost", low=1)] = 256
    json: Annotated[Path | None, _make_option("Write the figures here.", "--json", panel="Output")] = None
    markdown: Annotated[Path | None, _make_option("Write the tables here.", panel="Output")] = None
    plot: Annotated[Path | None, _make_option("Write a plot here, as PNG.", panel="Output")] = None
    no_color: Annotated[bool, _make_option("No colours; NO_COLOR does the same.", "--no-color", panel="Output")] = False

    def build_outputs(self) -> "ReportOutputs":
        """Raises ForedraftError for a file that could not be written."""
        from foredraft.bench.report import ReportOutputs

        outputs = ReportOutputs(self.json, self.markdown, self.plot)
        outputs.check()
        return outputs

    @property
    def llm_options(self) -> dict[str, Any]:
        """Arguments of LLM beside model, dtype and device; unset options keep its defaults."""
        return {"fused": False} if self.no_fused else {}

    def set_threads(self) -> int:
        """The number of threads, from here on torch's."""
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return torch.get_num_threads()


@dataclass(frozen=True)
class LatencyOptions(BenchOptions):
    quantization: Annotated[
        str | None, _make_option("int8 or int4: round the target's weights while loading.", panel="Model")
    ] = None
    rounds: Annotated[int, _make_option("Times every prompt is run; the median counts.", panel="Prompts", low=1)] = 1
    temperature: Annotated[float, _make_option("0 is greedy.", panel="Sampling")] = 0.0
    top_k: Annotated[int, _make_option("Draw from this many likeliest tokens; 0 is off.", panel="Sampling")] = 0
    top_p: Annotated[float, _make_option("Draw from the smallest set of this probability.", panel="Sampling")] = 1.0
    seed: Annotated[int | None, _make_option("Same seed, same text.", panel="Sampling")] = None
    stop_at_eos: Annotated[
        bool,
        _make_option("End where the text ends; else every text has --max-tokens.", "--stop-at-eos", panel="Sampling"),
    ] = False
    verify: Annotated[str, _make_option("Rule: auto, match, reject, block; typical is lossy.", panel="Model")] = "auto"
    device: Annotated[str, _make_option("auto, cpu or cuda.", panel="Model")] = "auto"

    @property
    def llm_options(self) -> dict[str, Any]:
        return super().llm_options | ({} if self.quantization is None else {"quantization": self.quantization})

    def build_sampling(self) -> "Sampling":
        """Raises UsageError on impossible values."""
        from foredraft.sampling.params import Sampling

        try:
            return Sampling(
                max_tokens=self.max_tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
                seed=self.seed, ignore_eos=not self.stop_at_eos,
            )  # fmt: skip
        except ValueError as error:
            name, _, rest = str(error).partition(" ")
            raise UsageError(f"--{name.replace('_', '-')} {rest}" if hasattr(self, name) else str(error)) from None


@dataclass(frozen=True)
class CompareOptions(BenchOptions):
    dtype: Annotated[str, _make_option("bfloat16 or float32.", panel="Model")] = "bfloat16"
    quantization: Annotated[
        list[str] | None,
        typer.Option(
            help="Also int8 or int4 weights, beside llama.cpp's Q8_0 or Q4_0; repeatable, or by commas.",
            rich_help_panel="Model",
            metavar="KIND",
        ),
    ] = None
    spec_tokens: Annotated[
        int, _make_option("Draft length of the other programs' draft model.", panel="Programs", low=1)
    ] = 3
    lookup_tokens: Annotated[
        int, _make_option("Draft length of the other programs' prompt lookup.", panel="Programs", low=1)
    ] = 8
    lookup_match: Annotated[int, _make_option("Longest match of their prompt lookup.", panel="Programs", low=1)] = 4
    transformers: Annotated[
        Path | None,
        _make_option("Python that has transformers, or its environment; our own if not given.", panel="Programs"),
    ] = None
    llama_cpp: Annotated[
        Path | None, _make_option("Python that has llama-cpp-python and gguf, or its environment.", panel="Programs")
    ] = None
    vllm: Annotated[Path | None, _make_option("Python that has vLLM, or its environment.", panel="Programs")] = None

    def parse_quantizations(self) -> tuple[str, ...]:
        """Parse the value. Raises UsageError for an unknown name."""
        asked = [name.strip() for text in self.quantization or [] for name in text.split(",") if name.strip()]
        for name in asked:
            if name not in ("int8", "int4"):
                raise UsageError(f"unknown quantization {name!r}; use one of: int8, int4")
        return tuple(dict.fromkeys(asked))


@dataclass(frozen=True)
class LoadOptions:
    model: Annotated[
        str | None, _make_option("Folder or Hub id of the target; the built-in model if not given.", panel="Model")
    ] = None
    method: Annotated[
        str, _make_option("What drafts; settings follow as key=value, e.g. draft_model:model=PATH.", panel="Model")
    ] = "draft_model"
    spec_model: Annotated[str | None, _make_option("Folder or Hub id of the draft model.", panel="Model")] = None
    dtype: Annotated[str, _make_option("auto, bfloat16, float16, float32 or float64.", panel="Model")] = "auto"
    device: Annotated[str, _make_option("auto, cpu or cuda.", panel="Model")] = "auto"
    threads: Annotated[
        int | None, _make_option("CPU threads; torch's own number if not given.", panel="Model", low=1)
    ] = None
    url: Annotated[
        str | None,
        _make_option(
            "Measure a running server, e.g. http://127.0.0.1:8000/v1; --model is what it runs.", panel="Server"
        ),
    ] = None
    api_key: Annotated[str | None, _make_option("Of that server.", panel="Server")] = None
    worker: Annotated[
        bool, _make_option("Put the engine on a thread of its own, as a server does.", "--worker", panel="Server")
    ] = False
    concurrency: Annotated[str, _make_option("Streams at once, by commas.", panel="Load")] = "1,2,4,8,16,32,64"
    fixed: Annotated[str, _make_option("Fixed draft lengths to measure, by commas.", panel="Load")] = "4"
    more: Annotated[
        str, _make_option("Further ones at few streams, among which the best is looked for; '' for none.", panel="Load")
    ] = "1,2,3,6,8"
    more_until: Annotated[int, _make_option("Streams up to which --more is measured.", panel="Load", low=0)] = 4
    rounds: Annotated[int, _make_option("Times all modes answer in turn, at most.", panel="Load", low=1)] = 5
    minutes: Annotated[
        float | None,
        _make_option("For everything: rounds are left out, but two, to keep to it.", panel="Load", low=0.01),
    ] = None
    waves: Annotated[float, _make_option("Requests for each stream in a round.", panel="Load", low=1)] = 2.0
    least: Annotated[int, _make_option("Requests of a round at least.", panel="Load", low=1)] = 8
    prompts: Annotated[
        int | None,
        _make_option("How many; 20 built-in ones, or all of --questions, if not given.", panel="Prompts", low=1),
    ] = None
    questions: Annotated[
        Path | None, _make_option('JSONL of {"turns": ["...", ...]}; the first turn is asked.', panel="Prompts")
    ] = None
    prompt_tokens: Annotated[
        int | None, _make_option("Cut prompts to their last so many tokens.", panel="Prompts", low=1)
    ] = None
    max_tokens: Annotated[
        int,
        _make_option("Mean length of a text; lengths are spread from half to one and a half.", panel="Prompts", low=1),
    ] = 96
    temperature: Annotated[float, _make_option("0 is greedy.", panel="Sampling")] = 0.0
    top_p: Annotated[float, _make_option("Draw from the smallest set of this probability.", panel="Sampling")] = 1.0
    seed: Annotated[int | None, _make_option("Same seed, same text.", panel="Sampling")] = None
    json: Annotated[Path | None, _make_option("Write the figures here.", "--json", panel="Output")] = None
    markdown: Annotated[Path | None, _make_option("Write the tables here.", panel="Output")] = None
    plot: Annotated[Path | None, _make_option("Write a plot here, as PNG.", panel="Output")] = None
    no_color: Annotated[bool, _make_option("No colours; NO_COLOR does the same.", "--no-color", panel="Output")] = False

    def build_outputs(self) -> "ReportOutputs":
        """Raises ForedraftError for a file that could not be written."""
        from foredraft.bench.report import ReportOutputs

        outputs = ReportOutputs(self.json, self.markdown, self.plot)
        outputs.check()
        return outputs

    def build_plan(self) -> "LoadPlan":
        """Raises UsageError for what is no number or impossible."""
        from foredraft.bench import questions
        from foredraft.bench.load_report import LoadBenchPlan
        from foredraft.sampling.params import Sampling

        try:
            sampling = Sampling(
                max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed,
                ignore_eos=True,
            )  # fmt: skip
        except ValueError as error:
            option, _, rest = str(error).partition(" ")
            raise UsageError(f"--{option.replace('_', '-')} {rest}") from None
        return LoadBenchPlan(
            concurrency=tuple(sorted(set(_parse_numbers("--concurrency", self.concurrency)))),
            fixed=_parse_numbers("--fixed", self.fixed) if self.fixed else (),
            more=_parse_numbers("--more", self.more) if self.more else (),
            more_until=self.more_until,
            questions=tuple(questions.load_questions(self.questions, self.prompts)),
            sampling=sampling,
            prompt_tokens=self.prompt_tokens,
            waves=self.waves,
            least=self.least,
            rounds=self.rounds,
            minutes=self.minutes,
        )

    def set_threads(self) -> None:
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)


@dataclass(frozen=True)
class MicroOptions:
    kinds: Annotated[str, _make_option("Of weights, by commas.", panel="Kernels")] = "bfloat16,float32,int8,int4"
    shapes: Annotated[str, _make_option("Outputs x inputs, by commas.", panel="Kernels")] = "6144x1536,1536x4096"
    rows: Annotated[
        str, _make_option("Rows multiplied together, by commas; the first is the base.", panel="Kernels")
    ] = "1,2,4,5,8,16,32"
    contexts: Annotated[str, _make_option("Keys attended to, by commas.", panel="Kernels")] = "256,1024"
    rounds: Annotated[int, _make_option("Times each is measured; the median counts.", panel="Kernels", low=1)] = 7
    threads: Annotated[
        int | None, _make_option("CPU threads; torch's own number if not given.", panel="Kernels", low=1)
    ] = None
    json: Annotated[Path | None, _make_option("Write the figures here.", "--json", panel="Output")] = None
    markdown: Annotated[Path | None, _make_option("Write the tables here.", panel="Output")] = None
    no_color: Annotated[bool, _make_option("No colours; NO_COLOR does the same.", "--no-color", panel="Output")] = False

    def build_plan(self) -> "KernelBenchPlan":
        """Raises UsageError for what is no number."""
        from foredraft.bench.micro import KernelBenchPlan

        shapes = [_parse_numbers("--shapes", text, "x") for text in self.shapes.split(",")]
        if any(len(shape) != 2 for shape in shapes):
            raise UsageError(f"--shapes {self.shapes!r}: write outputs x inputs, e.g. 6144x1536,1536x4096")
        return KernelBenchPlan(
            shapes=tuple((n, k) for n, k in shapes),
            rows=_parse_numbers("--rows", self.rows),
            kinds=tuple(kind.strip() for kind in self.kinds.split(",")),
            contexts=_parse_numbers("--contexts", self.contexts),
            rounds=self.rounds,
        )

    def set_threads(self) -> None:
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)


def _parse_numbers(option: str, text: str, separator: str = ",") -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(separator)]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{option} {text!r}: numbers from 1 on are wanted")
    return tuple(map(int, parts))
