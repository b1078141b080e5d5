"""Options of `foredraft bench`. Options shared with `foredraft generate` have the same names."""

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

# Help texts of options that several commands have.
_NO_COLOR_HELP = "Print without colours, as with NO_COLOR in the environment."
_THREADS_HELP = "Number of CPU threads. Default: torch's default."
_SEED_HELP = "Random seed; equal seeds give equal text. Default: none."
_TOP_P_HELP = "Sample from the smallest set of tokens with this total probability; 1 is off."
_PROMPTS_HELP = "Number of prompts. Default: 20 built-in prompts, or all of the file in --questions."


def _make_option(help: str, *names: str, panel: str, low: float | None = None, high: float | None = None) -> Any:  # noqa: A002
    # The parameter shadows the builtin because typer's parameter is called `help`.
    return typer.Option(*names, help=help, rich_help_panel=panel, min=low, max=high)


@dataclass(frozen=True)
class BenchOptions:
    """Options of `foredraft bench latency` and `foredraft bench compare`."""

    model: Annotated[
        str | None, _make_option("Folder or Hub id of the target. Default: the built-in model.", panel="Model")
    ] = None
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Drafting methods, separated by commas; ngram:8 drafts 8 tokens, and key=value adds a setting, as in "
            "draft_model:2:model=PATH. Default: all methods.",
            rich_help_panel="Model",
            metavar="METHOD[:K],...",
        ),
    ] = None
    spec_model: Annotated[
        str | None,
        _make_option("Folder or Hub id of the draft model of every method that takes one.", panel="Model"),
    ] = None
    dtype: Annotated[
        str, _make_option("Dtype of the target: auto, bfloat16, float16, float32 or float64.", panel="Model")
    ] = "auto"
    threads: Annotated[int | None, _make_option(_THREADS_HELP, panel="Model", low=1)] = None
    no_fused: Annotated[
        bool, _make_option("Run the model's PyTorch modules, not the native CPU code.", "--no-fused", panel="Model")
    ] = False
    kv_dtype: Annotated[
        str, _make_option("Dtype of keys and values: auto, or int8 for half the memory on CPU.", panel="Model")
    ] = "auto"
    exact: Annotated[
        bool, _make_option("Require the same bits with drafts and without; slower on a GPU.", "--exact", panel="Model")
    ] = False
    prompts: Annotated[int | None, _make_option(_PROMPTS_HELP, panel="Prompts", low=0)] = None
    questions: Annotated[
        Path | None,
        _make_option(
            'JSONL file of {"turns": ["...", ...]}, the format of Spec-Bench and MT-bench; or a built-in set: code, '
            "editing, logs, prose, summaries, answers, chat; corrections for an encoder-decoder. Default: code.",
            panel="Prompts",
        ),
    ] = None
    max_tokens: Annotated[int, _make_option("Longest output, in tokens.", panel="Prompts", low=1)] = 128
    verify_cost: Annotated[
        str | None,
        _make_option(
            "Time a forward pass of the target over these numbers of tokens, such as 1,2,4,5,8,16; add --prompts 0 to "
            "measure nothing else.",
            panel="Cost",
        ),
    ] = None
    context: Annotated[
        int, _make_option("Tokens in the KV cache before the tokens of --verify-cost.", panel="Cost", low=1)
    ] = 256
    json: Annotated[Path | None, _make_option("Write the figures to this JSON file.", "--json", panel="Output")] = None
    markdown: Annotated[Path | None, _make_option("Write the tables to this Markdown file.", panel="Output")] = None
    plot: Annotated[Path | None, _make_option("Write a plot to this PNG file.", panel="Output")] = None
    no_color: Annotated[bool, _make_option(_NO_COLOR_HELP, "--no-color", panel="Output")] = False

    def build_outputs(self) -> "ReportOutputs":
        """Return the output files. Raises ForedraftError if one of them cannot be written."""
        from foredraft.bench.report import ReportOutputs

        outputs = ReportOutputs(self.json, self.markdown, self.plot)
        outputs.check()
        return outputs

    @property
    def llm_options(self) -> dict[str, Any]:
        """Arguments of `LLM` besides model, dtype and device; an option that is not set is left out."""
        switches = ({"fused": False} if self.no_fused else {}) | ({"exact": True} if self.exact else {})
        return switches | ({} if self.kv_dtype == "auto" else {"kv_dtype": self.kv_dtype})

    def set_threads(self) -> int:
        """Set torch's number of CPU threads if --threads is given, and return the number in use."""
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return torch.get_num_threads()


@dataclass(frozen=True)
class LatencyOptions(BenchOptions):
    """Options of `foredraft bench latency`."""

    quantization: Annotated[
        str | None,
        _make_option("Round the target's weights to int8 or int4 while loading. Default: off.", panel="Model"),
    ] = None
    rounds: Annotated[
        int, _make_option("Runs of each prompt; the median time is reported.", panel="Prompts", low=1)
    ] = 1
    temperature: Annotated[float, _make_option("Sampling temperature; 0 is greedy decoding.", panel="Sampling")] = 0.0
    top_k: Annotated[int, _make_option("Sample from this many likeliest tokens; 0 is off.", panel="Sampling")] = 0
    top_p: Annotated[float, _make_option(_TOP_P_HELP, panel="Sampling")] = 1.0
    seed: Annotated[int | None, _make_option(_SEED_HELP, panel="Sampling")] = None
    stop_at_eos: Annotated[
        bool,
        _make_option(
            "End an output at the end-of-text token. Without it every output has --max-tokens tokens.",
            "--stop-at-eos",
            panel="Sampling",
        ),
    ] = False
    verify: Annotated[
        str,
        _make_option(
            "Verification rule: auto, match, reject, block or spectr; typical, which is lossy.", panel="Model"
        ),
    ] = "auto"
    device: Annotated[str, _make_option("Device of the models: auto, cpu or cuda.", panel="Model")] = "auto"

    @property
    def llm_options(self) -> dict[str, Any]:
        return super().llm_options | ({} if self.quantization is None else {"quantization": self.quantization})

    def build_sampling(self) -> "Sampling":
        """Return the sampling parameters. Raises UsageError for a value out of range."""
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
    """Options of `foredraft bench compare`."""

    dtype: Annotated[str, _make_option("Dtype of the weights: bfloat16 or float32.", panel="Model")] = "bfloat16"
    quantization: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure int8 or int4 weights too, against Q8_0 or Q4_0 of llama.cpp; repeatable, or separated by "
            "commas. Default: none.",
            rich_help_panel="Model",
            metavar="KIND",
        ),
    ] = None
    streams: Annotated[
        str | None,
        _make_option(
            "Measure plain decoding with these numbers of sequences at once, such as 8,16,32,64; add --prompts 0 to "
            "measure nothing else.",
            panel="Cost",
        ),
    ] = None
    spec_tokens: Annotated[
        int, _make_option("Draft length in tokens of the other programs with a draft model.", panel="Programs", low=1)
    ] = 3
    lookup_tokens: Annotated[
        int, _make_option("Draft length in tokens of the other programs' prompt lookup.", panel="Programs", low=1)
    ] = 8
    lookup_match: Annotated[
        int, _make_option("Longest match in tokens of the other programs' prompt lookup.", panel="Programs", low=1)
    ] = 4
    transformers: Annotated[
        Path | None,
        _make_option(
            "Python executable or environment with transformers. Default: the one of Foredraft.", panel="Programs"
        ),
    ] = None
    llama_cpp: Annotated[
        Path | None,
        _make_option(
            "Python executable or environment with llama-cpp-python and gguf. Default: llama.cpp is left out.",
            panel="Programs",
        ),
    ] = None
    vllm: Annotated[
        Path | None,
        _make_option("Python executable or environment with vLLM. Default: vLLM is left out.", panel="Programs"),
    ] = None

    def parse_quantizations(self) -> tuple[str, ...]:
        """Return the names in --quantization, each once. Raises UsageError for an unknown name."""
        names = [name.strip() for text in self.quantization or [] for name in text.split(",") if name.strip()]
        for name in names:
            if name not in ("int8", "int4"):
                raise UsageError(f"unknown quantization {name!r}; use one of: int8, int4")
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class LoadOptions:
    """Options of `foredraft bench load`."""

    model: Annotated[
        str | None, _make_option("Folder or Hub id of the target. Default: the built-in model.", panel="Model")
    ] = None
    method: Annotated[
        str,
        _make_option(
            "Drafting method without a draft length; key=value adds a setting, as in draft_model:model=PATH.",
            panel="Model",
        ),
    ] = "draft_model"
    spec_model: Annotated[str | None, _make_option("Folder or Hub id of the draft model.", panel="Model")] = None
    dtype: Annotated[
        str, _make_option("Dtype of the target: auto, bfloat16, float16, float32 or float64.", panel="Model")
    ] = "auto"
    device: Annotated[str, _make_option("Device of the models: auto, cpu or cuda.", panel="Model")] = "auto"
    threads: Annotated[int | None, _make_option(_THREADS_HELP, panel="Model", low=1)] = None
    url: Annotated[
        str | None,
        _make_option(
            "Measure the server at this address, such as http://127.0.0.1:8000/v1; --model is the model that it "
            "serves. Default: an engine in this process.",
            panel="Server",
        ),
    ] = None
    api_key: Annotated[str | None, _make_option("API key of the server at --url.", panel="Server")] = None
    worker: Annotated[
        bool,
        _make_option(
            "Run the engine of this process on a separate thread, as a server does.", "--worker", panel="Server"
        ),
    ] = False
    concurrency: Annotated[str, _make_option("Numbers of concurrent requests, separated by commas.", panel="Load")] = (
        "1,2,4,8,16,32,64"
    )
    fixed: Annotated[
        str, _make_option("Fixed draft lengths to measure, in tokens, separated by commas.", panel="Load")
    ] = "4"
    more: Annotated[
        str,
        _make_option(
            "Further fixed draft lengths up to --more-until concurrent requests, to find the best; '' is none.",
            panel="Load",
        ),
    ] = "1,2,3,6,8"
    more_until: Annotated[
        int, _make_option("Most concurrent requests for which --more is measured.", panel="Load", low=0)
    ] = 4
    rounds: Annotated[int, _make_option("Most rounds; each round runs every mode once.", panel="Load", low=1)] = 5
    minutes: Annotated[
        float | None,
        _make_option(
            "Time limit of the measurement, in minutes; at least two rounds run. Default: none.",
            panel="Load",
            low=0.01,
        ),
    ] = None
    waves: Annotated[float, _make_option("Requests per round and concurrent request.", panel="Load", low=1)] = 2.0
    least: Annotated[int, _make_option("Fewest requests per round.", panel="Load", low=1)] = 8
    prompts: Annotated[int | None, _make_option(_PROMPTS_HELP, panel="Prompts", low=1)] = None
    questions: Annotated[
        Path | None,
        _make_option('JSONL file of {"turns": ["...", ...]}; a prompt is the first turn.', panel="Prompts"),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        _make_option("Keep only this many tokens at the end of a prompt. Default: all.", panel="Prompts", low=1),
    ] = None
    max_tokens: Annotated[
        int,
        _make_option(
            "Mean output length, in tokens; lengths vary between 0.5 and 1.5 times the mean.", panel="Prompts", low=1
        ),
    ] = 96
    temperature: Annotated[float, _make_option("Sampling temperature; 0 is greedy decoding.", panel="Sampling")] = 0.0
    top_p: Annotated[float, _make_option(_TOP_P_HELP, panel="Sampling")] = 1.0
    seed: Annotated[int | None, _make_option(_SEED_HELP, panel="Sampling")] = None
    json: Annotated[Path | None, _make_option("Write the figures to this JSON file.", "--json", panel="Output")] = None
    markdown: Annotated[Path | None, _make_option("Write the tables to this Markdown file.", panel="Output")] = None
    plot: Annotated[Path | None, _make_option("Write a plot to this PNG file.", panel="Output")] = None
    no_color: Annotated[bool, _make_option(_NO_COLOR_HELP, "--no-color", panel="Output")] = False

    def build_outputs(self) -> "ReportOutputs":
        """Return the output files. Raises ForedraftError if one of them cannot be written."""
        from foredraft.bench.report import ReportOutputs

        outputs = ReportOutputs(self.json, self.markdown, self.plot)
        outputs.check()
        return outputs

    def build_plan(self) -> "LoadPlan":
        """Return the plan of the measurement. Raises UsageError for a value that is no number or out of range."""
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
    """Options of `foredraft bench micro`."""

    kinds: Annotated[str, _make_option("Weight formats, separated by commas.", panel="Kernels")] = (
        "bfloat16,float32,int8,int4"
    )
    shapes: Annotated[str, _make_option("Weight shapes as OUTPUTSxINPUTS, separated by commas.", panel="Kernels")] = (
        "6144x1536,1536x4096"
    )
    rows: Annotated[
        str,
        _make_option(
            "Numbers of rows in a matrix product, separated by commas; ratios are to the first.", panel="Kernels"
        ),
    ] = "1,2,4,5,8,16,32"
    contexts: Annotated[
        str, _make_option("Context lengths of attention in tokens, separated by commas.", panel="Kernels")
    ] = "256,1024"
    rounds: Annotated[
        int, _make_option("Runs of each measurement; the median time is reported.", panel="Kernels", low=1)
    ] = 7
    threads: Annotated[int | None, _make_option(_THREADS_HELP, panel="Kernels", low=1)] = None
    json: Annotated[Path | None, _make_option("Write the figures to this JSON file.", "--json", panel="Output")] = None
    markdown: Annotated[Path | None, _make_option("Write the tables to this Markdown file.", panel="Output")] = None
    no_color: Annotated[bool, _make_option(_NO_COLOR_HELP, "--no-color", panel="Output")] = False

    def build_plan(self) -> "KernelBenchPlan":
        """Return the plan of the measurement. Raises UsageError for a value that is no number."""
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
        raise UsageError(f"{option} {text!r}: must be numbers from 1 up, separated by {separator!r}")
    return tuple(map(int, parts))
