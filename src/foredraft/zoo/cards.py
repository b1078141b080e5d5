"""The model cards of the built-in target and its drafts, as Markdown."""

import json

from foredraft.zoo import corpus
from foredraft.zoo.collect import About
from foredraft.zoo.measure import MAX_DRAFT, PairFigures
from foredraft.zoo.recipe import Recipe

HELD_PACKAGES = "held-out packages"  # the figures of the draft over the packages' files


def card(name: str, recipe: Recipe, figures: dict[str, PairFigures], about: About, log: str) -> str:
    """The model card; `log` is the training log, a JSON object a line."""
    own = figures.get(name, figures["draft"])
    loss = own.target_loss if name == "target" else own.draft_loss
    distilled = "KL(p || q) to the target's law" if name == "draft" else "next-token cross-entropy"
    lines = [
        f"# Foredraft built-in {name}",
        "",
        "A small Llama-architecture model of Python source code, for trying and testing speculative decoding.",
        "It is far too small to be a useful assistant.",
        "",
        f"- Data: {about.of_library}, and {len(about.packages)} packages (below); {about.train_tokens:,} tokens of "
        f"{about.train_chars:,} characters in all (digest {about.digests['train.npy']}). Near-duplicates are left out "
        "(`foredraft.zoo.duplicates`), so are licence headers and machine-written files.",
        f"- Held out, with their tests: {', '.join(sorted(corpus.HELD_OUT))}; and the packages "
        f"{', '.join(str(facts['name']) for facts in about.held_packages) or 'none'}.",
        f"- Recipe: {distilled}; {_course(log)}; {recipe.batch_tokens} tokens a step; Muon for matrices, AdamW for the "
        f"rest, learning rate {recipe.learning_rate}, constant, then a linear decay to zero; seed {recipe.seed}. "
        "`foredraft zoo train` repeats it.",
        f"- Held-out loss: {loss:.3f} nats per token, {loss / about.bytes_per_token:.3f} per byte ({own.num_tokens:,} "
        "tokens).",
    ]
    if HELD_PACKAGES in figures:
        others = figures[HELD_PACKAGES]
        value = others.target_loss if name == "target" else others.draft_loss
        lines.append(f"- Loss on the held-out packages: {value:.3f} nats per token ({others.num_tokens:,} tokens).")
    lines.append("")
    if name != "target":
        lines += _acceptance({key: value for key, value in figures.items() if key != HELD_PACKAGES})
    if name == "target":
        lines += _packages(about)
    return "\n".join(lines)


def _acceptance(figures: dict[str, PairFigures]) -> list[str]:
    lines = [
        "Acceptance against the built-in target, held-out text, p and q at temperature 1:",
        "",
        "| draft | alpha = mean sum min(p, q) | greedy agreement | " + " | ".join(f"K={k}" for k in range(1, 9)) + " |",
        "|---|---|---|" + "---|" * MAX_DRAFT,
    ]
    for name, f in figures.items():
        for law, lengths, rate in (("sampled", f.lengths, f.alpha), ("greedy", f.greedy_lengths, f.greedy_agreement)):
            cells = " | ".join(f"{length:.2f}" for length in lengths)
            first = f"{rate:.3f} |  " if law == "sampled" else f" | {rate:.3f} "
            lines.append(f"| {name}, {law} | {first}| {cells} |")
    lines += ["", "The columns K are the expected acceptance length, bonus included, for drafts of K tokens.", ""]
    return lines


def _course(log: str) -> str:
    """The stages as they were run: steps by depth, and the decay."""
    rows = [json.loads(line) for line in log.splitlines()]
    at_rate = [row for row in rows if "decay_from" not in row]
    ends = {row["layers"]: row["step"] for row in at_rate}
    parts, before = [], 0
    for layers, end in ends.items():
        parts.append(f"{end - before} steps with {layers} layers")
        before = end
    parts.append(f"{rows[-1]['step'] - before} steps of decay")
    return ", ".join(parts)


def _packages(about: About) -> list[str]:
    """The table of what was read."""
    lines = ["| package | version | licence | files | characters | digest |", "|---|---|---|---|---|---|"]
    keys = ("name", "version", "licence", "files", "chars", "digest")
    lines += ["| " + " | ".join(str(facts[key]) for key in keys) + " |" for facts in about.packages]
    return [*lines, ""] if about.packages else []
