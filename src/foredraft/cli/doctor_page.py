"""The page of `foredraft doctor`: sections of lines and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.style import Style
from rich.text import Text

from foredraft.cli.tables import Grid, print_grid

if TYPE_CHECKING:
    from foredraft.doctor.diagnosis import Diagnosis, DrafterDiagnosis
    from foredraft.doctor.facts import DrafterFacts

MAX_POSITIONS = 8  # draft nodes in the table of the acceptance
SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # rows of the target's pass in the table of the cost curve


@dataclass(frozen=True)
class Section:
    """A title with lines, and tables below them."""

    title: str
    lines: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()


def build_page(diagnosis: "Diagnosis", command: str) -> list[Section]:
    """Return the sections of the page, in order."""
    sections = [
        _describe_machine(diagnosis),
        _describe_target(diagnosis),
        _describe_drafters(diagnosis),
        _describe_acceptance(diagnosis),
        _describe_costs(diagnosis),
        _describe_speed(diagnosis),
        _describe_verdict(diagnosis, command),
        _describe_warnings(diagnosis),
    ]
    return [section for section in sections if section.lines or section.grids]


def print_page(sections: Sequence[Section], screen: Console) -> None:
    """Print the sections; tables fit the width of the console."""
    for number, section in enumerate(sections):
        if number:
            screen.print()
        screen.print(Text(section.title, Style(bold=True)))
        for line in section.lines:
            screen.print(Text(f"  {line}"), soft_wrap=True)
        for grid in section.grids:
            print_grid(screen, grid)


def _describe_machine(diagnosis: "Diagnosis") -> Section:
    machine = diagnosis.machine
    facts = machine.description
    speed = "memory bandwidth not measured" if machine.bandwidth is None else f"{machine.bandwidth:.1f} GB/s of memory"
    threads, cores = _format_number(facts["threads"], "thread"), _format_number(facts["cores"], "core")
    versions = ", ".join(f"{name} {facts[name]}" for name in ("foredraft", "torch", "transformers"))
    lines = (
        f"{machine.device}: {threads} on {cores}, {speed}, {_format_bytes(machine.free_bytes)} free",
        f"{versions}; kernels: {machine.kernels or 'none'}",
    )
    return Section("Machine", lines)


def _describe_target(diagnosis: "Diagnosis") -> Section:
    target = diagnosis.target
    weights = target.dtype + (f" with {target.quantization} weights" if target.quantization else "")
    code = "native code" if target.is_native else f"torch modules ({target.reason})"
    code += ", exact" if target.is_exact else ""
    lines = (
        f"{target.name}: {target.architecture}, {_format_count(target.parameters)} parameters, {weights}, {code}",
        f"context {target.context_length} tokens, vocabulary {target.vocab_size}",
        f"weights {_format_bytes(target.weight_bytes)}, KV {_format_bytes(target.kv_bytes_per_token)} a token, "
        f"room for {target.kv_tokens} tokens: {target.largest_batch} requests of {target.context} tokens",
    )
    return Section("Model", lines)


def _describe_drafters(diagnosis: "Diagnosis") -> Section:
    header = ("drafter", "method", "parameters", "dtype", "files", "KV a token", "draft", "tokenizer", "runs as")
    rows = tuple(_format_drafter(drafter.facts) for drafter in diagnosis.drafters)
    lines = tuple(f"{label} cannot be used: {reason}" for label, reason in diagnosis.unfit.items())
    return Section("Drafters", lines, (Grid(header, rows, 2),) if rows else ())


def _format_drafter(facts: "DrafterFacts") -> tuple[str, ...]:
    native = {None: "no network", True: "native code", False: "torch modules"}[facts.is_native]
    return (
        facts.label,
        facts.method,
        "-" if facts.parameters is None else _format_count(facts.parameters),
        facts.dtype or "-",
        _format_bytes(facts.file_bytes) if facts.file_bytes else "-",
        _format_bytes(facts.kv_bytes_per_token) if facts.kv_bytes_per_token else "-",
        f"{'chain' if facts.is_chain else 'tree'} of {facts.max_nodes}",
        "the target's" if facts.vocabulary == "same" else facts.vocabulary,
        native,
    )


def _describe_acceptance(diagnosis: "Diagnosis") -> Section:
    drafters = diagnosis.drafters
    width = min(max((len(drafter.result.acceptance.survival) for drafter in drafters), default=0), MAX_POSITIONS)
    header = ("drafter", "drafts", *(str(position) for position in range(1, width + 1)))
    rows = []
    for drafter in drafters:
        acceptance = drafter.result.acceptance
        rates = [f"{rate:.2f}" for rate in acceptance.survival[:width]]
        padding = [""] * (width - len(rates))
        rows.append((drafter.candidate.label, str(acceptance.num_drafts), *rates, *padding))
    lines = ("share of drafts that are accepted up to each position, over drafts of several lengths",)
    return Section("Acceptance", lines if rows else (), (Grid(header, tuple(rows)),) if rows else ())


def _describe_costs(diagnosis: "Diagnosis") -> Section:
    points = {rows: seconds for rows, seconds in diagnosis.points if rows in SHOWN_ROWS}
    host = diagnosis.host_seconds
    lines = [] if host is None else [f"a step of plain decoding takes {_format_ms(host)} beside the target's pass"]
    grids = []
    if points:
        cells = tuple(_format_ms(seconds) for seconds in points.values())
        grids.append(Grid(("rows of a pass", *map(str, points)), (("target", *cells),)))
    rows = tuple(_format_draft_costs(drafter) for drafter in diagnosis.drafters)
    if rows:
        grids.append(Grid(("drafter", "1 node", "each further node", "first draft of a request"), rows))
    return Section("Costs", tuple(lines), tuple(grids))


def _format_draft_costs(drafter: "DrafterDiagnosis") -> tuple[str, ...]:
    count, costs = next(iter(drafter.result.costs.items()))
    one, two = (costs.drafting.predict_draft(count, n, n * count) for n in (1, 2))
    return drafter.candidate.label, _format_ms(one), _format_ms(two - one), f"+{_format_ms(drafter.result.draft_start)}"


def _describe_speed(diagnosis: "Diagnosis") -> Section:
    is_checked = any(drafter.checks for drafter in diagnosis.drafters)
    header = ("drafter", "streams", "best length", "tokens a pass", "tokens/s plain", "tokens/s", "speed-up")
    checked_header = ("measured", "error") if is_checked else ()
    rows = []
    for drafter in diagnosis.drafters:
        checks = {check.num_streams: check for check in drafter.checks}
        for one in drafter.result.predictions:
            cells = [
                drafter.candidate.label, str(one.num_streams), str(one.length), f"{one.tokens_per_pass:.2f}",
                f"{one.plain_rate:.0f}", f"{one.rate:.0f}", f"{one.speed_up:.2f}x",
            ]  # fmt: skip
            if one.num_streams in checks:
                measured = checks[one.num_streams].speed_up
                cells += [f"{measured:.2f}x", f"{one.speed_up / measured - 1.0:+.0%}"]
            rows.append(tuple(cells))
    lines = (f"predicted from acceptance and costs, for outputs of {diagnosis.output_tokens:.0f} tokens",)
    return Section("Speed-up", lines if rows else (), (Grid((*header, *checked_header), tuple(rows)),) if rows else ())


def _describe_verdict(diagnosis: "Diagnosis", command: str) -> Section:
    verdict = diagnosis.verdict
    if verdict.drafter is None:
        return Section("Verdict", ("no drafter is predicted to save time: decode without speculation", f"$ {command}"))
    parts = [
        f"{one.speed_up:.2f}x with {_format_number(one.num_streams, 'stream')}"
        if verdict.lengths[one.num_streams]
        else f"no gain with {one.num_streams}"
        for one in verdict.drafter.result.predictions
    ]
    return Section("Verdict", (f"{verdict.drafter.candidate.label}: {', '.join(parts)}", f"$ {command}"))


def _describe_warnings(diagnosis: "Diagnosis") -> Section:
    lines = tuple(
        f"{finding.code}: {f'{finding.drafter}: ' if finding.drafter else ''}{finding.text}. Remedy: {finding.remedy}"
        for finding in diagnosis.findings
    )
    return Section("Warnings", lines)


def _format_number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _format_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _format_count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def _format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
