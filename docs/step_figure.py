"""Draw docs/step.svg, the picture of one engine step: `python docs/step_figure.py`."""

from pathlib import Path

STEPS = (
    ("plan", "draft KV to flush, requests to preempt; then the batch, draft budgets, pages"),
    ("propose", "one small tree per request; uncomputed tokens before each root"),
    ("forward", "one forward pass of the target: logits, hidden states"),
    ("verify", "logits to p, row by row; match, reject, block or typical: accepted paths"),
    ("append tokens", "end at end id, stop string or length"),
    ("compact KV", "KV of the accepted path to the front"),
    ("observe", "paths, tokens, hidden states for the drafter"),
    ("commit", "advance requests, return pages"),
    ("emit deltas", "text to the readers; finished requests leave"),
    ("finish step", "report of sizes, times and drafts: the StepResult"),
)
WIDTH, HEIGHT, GAP, LEFT, TOP = 230, 30, 12, 40, 10


def draw_step(index: int) -> str:
    name, note = STEPS[index]
    y = TOP + index * (HEIGHT + GAP)
    middle = LEFT + WIDTH / 2
    parts = [
        f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#d5e8d4" stroke="#5b8c5a"/>',
        f'<text x="{middle}" y="{y + 20}" text-anchor="middle" font-weight="bold">{name}</text>',
        f'<text x="{LEFT + WIDTH + 14}" y="{y + 20}" fill="#555">{note}</text>',
    ]
    if index + 1 < len(STEPS):
        parts.append(f'<path d="M{middle} {y + HEIGHT} v{GAP - 2}" stroke="#444" marker-end="url(#tip)"/>')
    return "\n".join(parts)


def draw() -> str:
    height = TOP + len(STEPS) * (HEIGHT + GAP)
    last = TOP + (len(STEPS) - 1) * (HEIGHT + GAP) + HEIGHT / 2
    back = f"M{LEFT} {last} h-22 V{TOP + HEIGHT / 2} h20"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" '
            'font-family="sans-serif" font-size="13">',
            '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">'
            '<path d="M0 0 L6 3 L0 6 z" fill="#444"/></marker></defs>',
            f'<rect width="760" height="{height}" fill="white"/>',
            *(draw_step(index) for index in range(len(STEPS))),
            f'<path d="{back}" fill="none" stroke="#444" marker-end="url(#tip)"/>',
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (Path(__file__).parent / "step.svg").write_text(draw())
