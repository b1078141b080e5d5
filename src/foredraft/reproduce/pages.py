"""Pages made of records: one per claim, and the overview of a folder."""

from collections.abc import Mapping

from foredraft.reproduce.claim import Claim, Source
from foredraft.reproduce.pairs import PAIRS
from foredraft.reproduce.record import ClaimRecord
from foredraft.reproduce.registry import CLAIMS

OVERVIEW_TITLE = "# Claims of the literature"
QUICK_NOTE = "This was a quick run on a small target. Its figures only show that the command works."


def render_claim_page(claim: Claim, record: ClaimRecord) -> str:
    """Render the page of one claim as Markdown."""
    parts = [
        f"# {claim.title}",
        f"This page holds the measurement behind one claim of the literature: {_lower_first(claim.statement)}. "
        "Use it to check the figures of the overview. It was written by",
        f"```bash\n{record.command}\n```",
        *([QUICK_NOTE] if record.is_quick else []),
        f"![{claim.title}]({claim.name}.png)",
        "## Claimed\n\n" + _list_sources(claim.sources),
        "## Measured\n\n" + _list_lines(record.findings),
        "Conditions:\n\n" + _list_lines((*record.notes, record.machine_note)),
        *(f"## {table.title}\n\n{table.markdown}" for table in record.tables),
    ]
    return "\n\n".join(parts) + "\n"


def render_overview(records: Mapping[str, ClaimRecord]) -> str:
    """Render the overview of a folder as Markdown.

    Args:
        records: claim name -> record, for the claims that have been measured in this folder.
    """
    parts = [
        OVERVIEW_TITLE,
        "This page compares claims of the literature with measurements by Foredraft. Use it to see what holds on a "
        "small machine, and to repeat it. `foredraft reproduce` lists the claims; one command measures one of them and "
        "writes its table, its JSON file, its plot and this page:",
        "```bash\nforedraft reproduce acceptance --out figures\n```",
        _tabulate_claims(records),
        *(_render_section(claim, records.get(claim.name)) for claim in CLAIMS),
        _render_pairs(),
    ]
    return "\n\n".join(parts) + "\n"


def _tabulate_claims(records: Mapping[str, ClaimRecord]) -> str:
    lines = ["| name | claim | papers | measured in |", "|---|---|---|---:|"]
    for claim in CLAIMS:
        record = records.get(claim.name)
        papers = ", ".join(_link(source.paper) for source in claim.sources)
        minutes = "-" if record is None else f"{record.seconds / 60:.1f} min"
        lines.append(f"| [{claim.name}](#{_make_anchor(claim.title)}) | {claim.statement} | {papers} | {minutes} |")
    return "\n".join(lines)


def _render_section(claim: Claim, record: ClaimRecord | None) -> str:
    parts = [f"## {claim.title}", f"{claim.statement}.", "Claimed:", _list_sources(claim.sources)]
    if record is None:
        parts += [f"Not measured in this folder: `foredraft reproduce {claim.name} --out DIR`."]
        return "\n\n".join(parts)
    note = [QUICK_NOTE] if record.is_quick else []
    parts += [
        f"Measured, by `{record.command}`:", *note, _list_lines(record.findings),
        f"![{claim.title}]({claim.name}.png)",
        f"[All figures and conditions]({claim.name}.md). Machine: {record.machine_note}.",
    ]  # fmt: skip
    return "\n\n".join(parts)


def _render_pairs() -> str:
    lines = [
        "## Pairs of the literature",
        "",
        "No weights come with Foredraft but its own. With the folders of a pair, the command measures it; TARGET and "
        "DRAFTER are folders or hub ids, DIR the folder of the results.",
        "",
        "| target | drafter | stated | paper | command |",
        "|---|---|---|---|---|",
    ]
    for pair in PAIRS:
        paper = _link(pair.paper) if pair.paper else "-"
        drafter = pair.drafter or "its own first layers"
        lines.append(f"| {pair.target} | {drafter} | {pair.statement} | {paper} | `{pair.command}` |")
    return "\n".join(lines)


def _list_sources(sources: tuple[Source, ...]) -> str:
    return _list_lines([f"{_link(s.paper)}, *{s.title}*: {_lower_first(s.statement)}" for s in sources])


def _list_lines(lines: tuple[str, ...] | list[str]) -> str:
    return "\n".join(f"- {line[0].upper()}{line[1:]}." for line in lines)


def _link(paper: str) -> str:
    return f"[{paper}](https://arxiv.org/abs/{paper})"


def _lower_first(text: str) -> str:
    """Lower the first letter, unless the first word is a name, an abbreviation or a figure."""
    first = text.split()[0]
    return text if not first[1:].islower() and len(first) > 1 else text[0].lower() + text[1:]


def _make_anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
