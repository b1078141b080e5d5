"""Model cards of the built-in target and its draft models, as Markdown."""

import json

from foredraft.zoo import corpus
from foredraft.zoo_training.collect import CorpusSummary
from foredraft.zoo_training.distinct import NEW_TOKENS, OPENINGS
from foredraft.zoo_training.measure import MAX_DRAFT_TOKENS, PairMetrics
from foredraft.zoo_training.recipe import LlamaRecipe

HELD_OUT_PACKAGES_KEY = "held-out packages"  # key of the draft model's figures on the held-out packages


def render_card(
    name: str, recipe: LlamaRecipe, figures: dict[str, PairMetrics], summary: CorpusSummary, log: str, distinct: float
) -> str:
    """Return the model card as Markdown.

    Args:
        name: model, a name in `build.PARTS`.
        recipe: recipe that the model was trained with.
        figures: figures by draft model; those of the held-out packages under `HELD_OUT_PACKAGES_KEY`.
        summary: facts of the corpus.
        log: training log, one JSON object per line.
        distinct: share of distinct 4-grams in greedy texts of the target (`distinct.measure_distinct_share`).
    """
    own = figures.get(name, figures["draft"])
    loss = own.target_loss if name == "target" else own.draft_loss
    distilled = "KL(p || q) to the target's distribution" if name == "draft" else "next-token cross-entropy"
    again = ", in a further cycle a decay alone" if recipe.cycles else ""
    lines = [
        f"# Foredraft built-in {name}",
        "",
        "A small Llama-architecture model of Python source code, for trying and testing speculative decoding.",
        "It is far too small to be a useful assistant.",
        "",
        f"- Data: {summary.library_description}, and {len(summary.packages)} packages (below); "
        f"{summary.train_tokens:,} tokens of "
        f"{summary.train_chars:,} characters in all (digest {summary.digests['train.npy']}). Near-duplicates are "
        "left out "
        "(`foredraft.zoo_training.duplicates`), so are licence headers and machine-written files.",
        f"- Held out, with their tests: {', '.join(sorted(corpus.HELD_OUT_MODULES))}; and the packages "
        f"{', '.join(str(facts['name']) for facts in summary.held_packages) or 'none'}.",
        f"- Recipe: {distilled}; {_describe_schedule(log)}; {recipe.batch_tokens} tokens a step; Muon for "
        f"matrices, AdamW for the rest, learning rate {recipe.learning_rate}, constant, then a linear decay to zero"
        f"{again}; seed {recipe.seed}. `foredraft zoo train` repeats it.",
        f"- Held-out loss: {loss:.3f} nats per token, {loss / summary.bytes_per_token:.3f} per byte "
        f"({own.num_tokens:,} "
        "tokens).",
    ]
    if HELD_OUT_PACKAGES_KEY in figures:
        others = figures[HELD_OUT_PACKAGES_KEY]
        value = others.target_loss if name == "target" else others.draft_loss
        lines.append(f"- Loss on the held-out packages: {value:.3f} nats per token ({others.num_tokens:,} tokens).")
    if name == "target":
        text = f"Greedy texts of {NEW_TOKENS} tokens after {len(OPENINGS)} openings"
        lines.append(f"- {text}: {distinct:.0%} of their 4-grams are distinct.")
    lines.append("")
    if name != "target":
        lines += _render_acceptance({key: value for key, value in figures.items() if key != HELD_OUT_PACKAGES_KEY})
    if name == "target":
        lines += _render_packages(summary)
    return "\n".join(lines)


def _render_acceptance(figures: dict[str, PairMetrics]) -> list[str]:
    lines = [
        "Acceptance against the built-in target, held-out text, p and q at temperature 1:",
        "",
        "| draft | alpha = mean sum min(p, q) | greedy agreement | " + " | ".join(f"K={k}" for k in range(1, 9)) + " |",
        "|---|---|---|" + "---|" * MAX_DRAFT_TOKENS,
    ]
    for name, f in figures.items():
        for mode, lengths, rate in (("sampled", f.lengths, f.alpha), ("greedy", f.greedy_lengths, f.greedy_agreement)):
            cells = " | ".join(f"{length:.2f}" for length in lengths)
            first = f"{rate:.3f} |  " if mode == "sampled" else f" | {rate:.3f} "
            lines.append(f"| {name}, {mode} | {first}| {cells} |")
    lines += ["", "The columns K are the expected acceptance length, bonus included, for drafts of K tokens.", ""]
    return lines


def _describe_schedule(log: str) -> str:
    """Return the stages of training that the log shows: steps by depth, of the decay, and of the further cycles."""
    rows = [json.loads(line) for line in log.splitlines()]
    ends = {row["layers"]: row["step"] for row in rows if "decay_from" not in row}
    parts, before = [], 0
    for layers, end in ends.items():
        parts.append(f"{end - before} steps with {layers} layers")
        before = end
    for cycle, end in {row.get("cycle", 0): row["step"] for row in rows if "decay_from" in row}.items():
        parts.append(f"{end - before} steps of a further cycle" if cycle else f"{end - before} steps of decay")
        before = end
    return ", ".join(parts)


def _render_packages(summary: CorpusSummary) -> list[str]:
    """Return the lines of the table of packages in the corpus."""
    lines = ["| package | version | licence | files | characters | digest |", "|---|---|---|---|---|---|"]
    keys = ("name", "version", "licence", "files", "chars", "digest")
    lines += ["| " + " | ".join(str(facts[key]) for key in keys) + " |" for facts in summary.packages]
    return [*lines, ""] if summary.packages else []
