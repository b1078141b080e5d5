"""Draw the figures of the method pages: `python docs/methods/figures.py` writes one SVG per method beside this file.

A figure shows which inputs a method reads and which draft tokens it makes of them. The colours are the same in all.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

WIDTH = 760
STYLES = {  # fill, stroke, dash
    "token": ("#e8eaed", "#5f6368", ""),
    "state": ("#d2e3fc", "#1a73e8", ""),
    "part": ("#ceead6", "#188038", ""),
    "target": ("#e9d2fd", "#8430ce", ""),
    "draft": ("#fef0d5", "#e37400", "4 3"),
}
LEGEND = {
    "token": "committed token",
    "state": "hidden state of the target",
    "part": "drafter",
    "target": "target",
    "draft": "draft token",
}
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    'role="img" font-family="sans-serif" font-size="13">\n<title>{title}</title>\n'
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="#5f6368"/></marker></defs>\n'
    '<rect x="0.5" y="0.5" width="{frame_width}" height="{frame_height}" rx="8" fill="#ffffff" stroke="#dadce0"/>'
)
Point = tuple[float, float]


class Box:
    """A rectangle with a label; its edges are where arrows begin and end."""

    def __init__(self, x: float, y: float, w: float, h: float) -> None:
        self.left, self.right = (x, y + h / 2), (x + w, y + h / 2)
        self.top, self.bottom = (x + w / 2, y), (x + w / 2, y + h)


class Figure:
    """An SVG under construction. Coordinates are pixels from the upper left corner."""

    def __init__(self, title: str, height: int) -> None:
        self.height = height
        self.lines = [
            HEAD.format(width=WIDTH, height=height, title=title, frame_width=WIDTH - 1, frame_height=height - 1)
        ]
        self.used: set[str] = set()

    def box(self, x: float, y: float, label: str, style: str, w: float = 46, h: float = 28) -> Box:
        fill, stroke, dash = STYLES[style]
        self.used.add(style)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.lines.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{stroke}"{dashes}/>'
        )
        rows = label.split("\n")
        for i, row in enumerate(rows):
            self.text(x + w / 2, y + h / 2 + 4.5 + 15 * (i - (len(rows) - 1) / 2), row, "middle")
        return Box(x, y, w, h)

    def row(self, x: float, y: float, labels: Sequence[str], style: str, w: float = 46, gap: float = 6) -> list[Box]:
        return [self.box(x + i * (w + gap), y, label, style, w) for i, label in enumerate(labels)]

    def text(self, x: float, y: float, label: str, anchor: str = "start", color: str = "#202124") -> None:
        self.lines.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{label}</text>')

    def note(self, x: float, y: float, label: str, anchor: str = "start") -> None:
        self.text(x, y, label, anchor, "#5f6368")

    def arrow(self, start: Point, end: Point, bend: float | None = None) -> None:
        """Draw a straight arrow, or one that leaves and arrives vertically by way of the height `bend`."""
        (x1, y1), (x2, y2) = start, end
        path = f"M{x1},{y1} L{x2},{y2}" if bend is None else f"M{x1},{y1} C{x1},{bend} {x2},{bend} {x2},{y2}"
        self.lines.append(f'<path d="{path}" fill="none" stroke="#5f6368" stroke-width="1.3" marker-end="url(#tip)"/>')

    def link(self, boxes: Sequence[Box]) -> None:
        """Arrows from every box of a row to the next."""
        for a, b in pairwise(boxes):
            self.arrow(a.right, b.left)

    def bracket(self, boxes: Sequence[Box], label: str, gap: float = 6) -> Point:
        """Draw a bracket below a run of boxes; returns the point below its middle."""
        x1, x2, y = boxes[0].left[0], boxes[-1].right[0], boxes[0].bottom[1] + gap
        self.lines.append(
            f'<path d="M{x1},{y - 3} V{y + 3} H{x2} V{y - 3}" fill="none" stroke="#1a73e8" stroke-width="1.5"/>'
        )
        self.text((x1 + x2) / 2, y + 18, label, "middle", "#1a73e8")
        return (x1 + x2) / 2, y + 24

    def save(self, path: Path) -> None:
        x, y = 16.0, self.height - 24
        for style, meaning in LEGEND.items():
            if style in self.used:
                fill, stroke, dash = STYLES[style]
                dashes = f' stroke-dasharray="{dash}"' if dash else ""
                self.lines.append(
                    f'<rect x="{x}" y="{y}" width="16" height="12" rx="3" fill="{fill}" stroke="{stroke}"{dashes}/>'
                )
                self.note(x + 22, y + 10.5, meaning)
                x += 44 + 6.6 * len(meaning)
        path.write_text("\n".join([*self.lines, "</svg>"]) + "\n", encoding="utf-8")


def ngram() -> Figure:
    f = Figure("Prompt lookup: the draft copies what followed the last tokens earlier in the sequence", 190)
    tokens = f.row(16, 52, ["the", "cat", "sat", "on", "a", "mat", ".", "the", "cat"], "token")
    drafts = f.row(16 + 9 * 52, 52, ["sat", "on", "a", "mat"], "draft")
    f.bracket(tokens[0:2], "earlier match")
    f.bracket(tokens[7:9], "last tokens")
    f.arrow(tokens[2].top, drafts[0].top, 8)
    f.arrow(tokens[5].top, drafts[3].top, 8)
    f.note(16 + 9 * 52, 112, "copied continuation")
    return f


def suffix() -> Figure:
    f = Figure("Suffix: counts of continuations in three sources give the probabilities of the draft", 246)
    sources = [
        f.box(16, y, label, "token", 178, 40)
        for y, label in ((16, "own sequence"), (66, "past outputs\n(same cache salt)"), (116, "files"))
    ]
    automaton = f.box(246, 58, "longest known suffix:\ncounts of next tokens", "part", 170, 56)
    for source in sources:
        f.arrow(source.right, automaton.left)
    q = f.box(454, 66, "probabilities q", "part", 110, 40)
    f.arrow(automaton.right, q.left)
    first = f.box(608, 26, "sat", "draft")
    second = f.box(608, 118, "ran", "draft")
    third = f.box(690, 26, "on", "draft")
    f.arrow(q.right, first.left)
    f.arrow(q.right, second.left)
    f.arrow(first.right, third.left)
    f.note(454, 176, "a chain, or a tree with tree_nodes")
    return f


def lookahead() -> Figure:
    f = Figure("Lookahead: window columns and pool n-grams are verified in one tree", 280)
    root = f.box(84, 108, "x", "token")
    f.note(16, 127, "level 0")
    f.note(16, 181, "level 1")
    columns = f.row(156, 108, ["c1", "c2", "c3", "c4"], "draft", 46, 26)
    lower = [f.box(84, 162, "c0", "draft"), *f.row(156, 162, ["c1", "c2", "c3", "c4"], "draft", 46, 26)]
    f.link([root, *columns])
    for a, b in zip([root, *columns], lower, strict=True):
        f.arrow(a.bottom, b.top)
    f.note(84, 212, "window: every column moves by one level per step")
    for y, words in ((18, ("a", "b", "c")), (58, ("a", "d", "e"))):
        grams = f.row(156, y, words, "draft", 46, 26)
        f.arrow(root.top, grams[0].left)
        f.link(grams)
    f.note(16, 24, "n-grams that")
    f.note(16, 40, "begin with x")
    target = f.box(540, 110, "target:\none forward pass", "target", 150, 48)
    f.arrow((430, 150), target.left)
    f.note(456, 104, "one tree", "middle")
    pool = f.box(540, 30, "n-gram pool", "part", 150, 32)
    f.arrow(target.top, pool.bottom)
    f.note(622, 92, "argmax per node")
    f.arrow(pool.left, (362, 46))
    f.note(396, 38, "next draft")
    return f


def token_recycling() -> Figure:
    f = Figure("Token recycling: the target's candidates are kept by token, and drafted as a tree", 236)
    f.note(16, 30, "matrix")
    rows = (("the", ("cat", "mat")), ("cat", ("sat", "ran")), ("sat", ("on", "by")))
    for i, (token, candidates) in enumerate(rows):
        row = f.box(84, 12 + 44 * i, token, "token")
        kept = f.row(172, 12 + 44 * i, candidates, "part")
        f.arrow(row.right, kept[0].left)
    f.note(84, 158, "one row per token of the vocabulary")
    root = f.box(340, 62, "the", "token")
    cat, mat = f.box(428, 32, "cat", "draft"), f.box(428, 94, "mat", "draft")
    sat, ran = f.box(516, 12, "sat", "draft"), f.box(516, 56, "ran", "draft")
    for parent, child in ((root, cat), (root, mat), (cat, sat), (cat, ran)):
        f.arrow(parent.right, child.left)
    target = f.box(612, 54, "target:\none forward pass", "target", 132, 48)
    f.arrow((566, 78), target.left)
    f.arrow((678, 104), (678, 178))
    f.note(340, 196, "likeliest tokens after every node, rejected ones too, fill the rows again")
    return f


def aggressive() -> Figure:
    f = Figure("Aggressive: the draft copies the source, and continues after an edit", 236)
    f.note(16, 30, "source")
    source = f.row(84, 12, ["def", "add", "(", "a", ",", "b", ")", ":", "pass"], "token")
    f.note(16, 132, "output")
    out = f.row(84, 114, ["def", "sum", "(", "a"], "token")
    drafts = f.row(84 + 4 * 52, 114, [",", "b", ")", ":", "pass"], "draft")
    for i in (0, 2, 3):
        f.arrow(source[i].bottom, out[i].top)
    for i in range(5):
        f.arrow(source[i + 4].bottom, drafts[i].top)
    f.note(84 + 52, 166, "edit", "start")
    f.bracket(out[2:4], "match after the edit")
    f.note(330, 172, "copied from the matched position on")
    return f


def ngram_lm() -> Figure:
    f = Figure("N-gram language model: a trained table and counts of the running sequence give q", 210)
    table = f.box(16, 24, "trained n-gram table\n(optional)", "part", 178, 44)
    counts = f.box(16, 92, "counts of the\nrunning sequence", "part", 178, 44)
    q = f.box(264, 56, "interpolated\nprobabilities q", "part", 140, 48)
    f.arrow(table.right, q.left)
    f.arrow(counts.right, q.left)
    drafts = f.row(470, 66, ["d1", "d2", "d3", "d4"], "draft", 46, 18)
    f.arrow(q.right, drafts[0].left)
    f.link(drafts)
    f.arrow(drafts[1].bottom, (334, 104), 150)
    f.note(398, 160, "context of the next table lookup")
    return f


def draft_model() -> Figure:
    f = Figure("Draft model: a smaller model writes a few tokens, the target verifies them in one pass", 226)
    tokens = f.row(16, 26, ["x1", "x2", "x3", "x4"], "token")
    small = f.box(16 + 4 * 52 + 32, 16, "draft model\n(own KV cache)", "part", 130, 48)
    f.arrow(tokens[-1].right, small.left)
    drafts = f.row(470, 26, ["d1", "d2", "d3", "d4"], "draft", 46, 18)
    f.arrow(small.right, drafts[0].left)
    f.link(drafts)
    f.arrow(drafts[0].bottom, small.bottom, 104)
    f.note(668, 116, "one pass of the draft model per token, or per level of a tree", "end")
    f.box(16, 140, "target: one forward pass over x4, d1, d2, d3, d4", "target", 700, 36)
    f.arrow(tokens[-1].bottom, (195, 140))
    f.arrow(drafts[3].bottom, (685, 140))
    return f


def early_exit() -> Figure:
    f = Figure("Early exit: the first layers of the target draft, all layers verify", 258)
    token = f.box(16, 86, "x", "token")
    low = f.box(104, 70, "layers 1 to E", "target", 140, 60)
    high = f.box(310, 70, "layers E + 1 to L", "target", 150, 60)
    f.arrow(token.right, low.left)
    f.arrow(low.right, high.left)
    head = f.box(524, 70, "final norm\nand head", "target", 100, 60)
    f.arrow(high.right, head.left)
    exit_head = f.box(310, 160, "optional adapter,\nsame norm and head", "part", 150, 44)
    f.arrow(low.bottom, exit_head.left)
    drafts = f.row(510, 168, ["d1", "d2", "d3"], "draft", 46, 18)
    f.arrow(exit_head.right, drafts[0].left)
    f.link(drafts)
    f.note(310, 40, "verification: all layers")
    f.note(16, 186, "drafting: one pass of E layers")
    f.note(16, 202, "per token, on the target's")
    f.note(16, 218, "own KV cache")
    verified = f.box(672, 86, "p", "target", 60)
    f.arrow(head.right, verified.left)
    return f


def medusa() -> Figure:
    f = Figure("Medusa: each head predicts one position ahead from the same hidden state", 260)
    target = f.box(16, 92, "target's last\nforward pass", "target", 110, 48)
    state = f.box(176, 98, "h", "state", 46, 36)
    f.arrow(target.right, state.left)
    for i in range(4):
        y = 16 + 50 * i
        head = f.box(290, y, f"head {i + 1}", "part", 110, 32)
        f.arrow(state.right, head.left)
        draft = f.box(460, y + 2, f"d{i + 1}", "draft")
        f.arrow(head.right, draft.left)
        f.note(524, y + 21, f"position n + {i}" if i else "position n")
    f.note(16, 170, "state below the last")
    f.note(16, 186, "committed token")
    return f


def blockwise() -> Figure:
    f = Figure("Blockwise: one shared layer gives a state per position, the target's output matrix the logits", 250)
    state = f.box(16, 84, "h", "state", 46, 36)
    layer = f.box(112, 72, "feed-forward layer,\nshared", "part", 150, 60)
    f.arrow(state.right, layer.left)
    f.box(424, 16, "target's\noutput\nmatrix", "target", 90, 176)
    for i in range(4):
        y = 18 + 46 * i
        hidden = f.box(320, y + 2, f"s{i + 1}", "part", 46, 28)
        f.arrow(layer.right, hidden.left)
        f.arrow(hidden.right, (424, y + 16))
        draft = f.box(580, y + 2, f"d{i + 1}", "draft")
        f.arrow((514, y + 16), draft.left)
    return f


def mlp_speculator() -> Figure:
    f = Figure("MLP speculator: a state vector passes through one small layer per draft token", 230)
    state = f.box(16, 74, "h", "state", 46, 36)
    previous = state.right
    labels = ["x", "d1", "d2"]
    for i, label in enumerate(labels):
        x = 130 + 206 * i
        token = f.box(x + 22, 16, label, "draft" if i else "token")
        step = f.box(x, 74, f"step {i + 1}", "part", 90, 36)
        f.arrow(previous, step.left)
        f.arrow(token.bottom, step.top)
        out = f.box(x + 22, 148, f"d{i + 1}", "draft")
        f.arrow(step.bottom, out.top)
        if i:
            f.arrow((x - 206 + 68, 158), token.left)
        previous = step.right
    f.note(130 + 3 * 206 - 90, 96, "state of d3")
    f.note(16, 36, "embedding of")
    f.note(16, 52, "the last token")
    return f


def hydra() -> Figure:
    f = Figure("Hydra: head i reads the hidden state and the embeddings of all tokens since", 262)
    state = f.box(16, 98, "h", "state", 46, 36)
    inputs = [["x"], ["x", "d1"], ["x", "d1", "d2"]]
    for i, tokens in enumerate(inputs):
        y = 16 + 68 * i
        head = f.box(330, y, f"head {i + 1}", "part", 110, 40)
        read = [f.box(120 + 52 * j, y + 6, t, "draft" if j else "token") for j, t in enumerate(tokens)]
        f.arrow(state.right, read[0].left)
        f.arrow(read[-1].right, head.left)
        draft = f.box(510, y + 6, f"d{i + 1}", "draft")
        f.arrow(head.right, draft.left)
    f.note(580, 42, "heads run in turn;")
    f.note(580, 58, "no head has a KV cache")
    return f


def chimera() -> Figure:
    f = Figure("Chimera: a trigram encoder stands in for states that the target has not computed", 250)
    f.row(116, 16, ["x1", "x2", "x3"], "token")
    states = f.row(116, 46, ["h1", "h2", "h3"], "state")
    late = [f.box(116 + 3 * 52, 16, "x4", "token"), *f.row(116 + 4 * 52, 16, ["d1", "d2"], "draft")]
    f.note(16, 36, "token")
    f.note(16, 66, "its own state")
    f.box(116 + 3 * 52, 70, "trigram encoder", "part", 150, 28)
    for box in late:
        f.arrow(box.bottom, (box.bottom[0], 70))
    context = f.box(116, 136, "context encoder: one decoder layer", "part", 306, 36)
    for state in states:
        f.arrow(state.bottom, (state.bottom[0], 136))
    for box in late:
        f.arrow((box.bottom[0], 98), (box.bottom[0], 136))
    head = f.box(480, 128, "head k, then the\ntarget's output matrix", "part", 170, 52)
    f.arrow(context.right, head.left)
    out = f.box(694, 140, "d3", "draft")
    f.arrow(head.right, out.left)
    f.note(440, 78, "stands in for a state that the")
    f.note(440, 94, "target has not computed")
    return f


def eagle() -> Figure:
    f = Figure("EAGLE: a decoder layer reads a token and the hidden state before it, and predicts the next state", 246)
    f.note(16, 30, "token t + 1")
    f.note(16, 60, "state t")
    f.row(116, 10, ["x2", "x3", "x4"], "token", 46, 34)
    f.row(116 + 3 * 80, 10, ["d1", "d2"], "draft", 46, 34)
    states = f.row(116, 40, ["h1", "h2", "h3"], "state", 46, 34)
    own = f.row(116 + 3 * 80, 40, ["s4", "s5"], "part", 46, 34)
    layer = f.box(106, 114, "one decoder layer, with a KV cache of its own", "part", 386, 36)
    for state in [*states, *own]:
        f.arrow(state.bottom, (state.bottom[0], 114))
    head = f.box(552, 104, "target's\noutput matrix", "target", 110, 56)
    f.arrow(layer.right, head.left)
    out = f.box(584, 25, "d3", "draft")
    f.arrow(head.top, out.bottom)
    f.note(106, 180, "s4, s5: outputs of the layer, in place of states that the target has not computed")
    return f


def eagle3() -> Figure:
    f = Figure("EAGLE-3: states of three depths are fused, a decoder layer with its own head drafts", 250)
    f.box(16, 16, "", "target", 120, 176)
    f.text(76, 210, "target", "middle")
    states = []
    for y, label in ((24, "late layer"), (90, "middle layer"), (156, "early layer")):
        state = f.box(30, y, label, "state", 92, 28)
        states.append(state)
    fuse = f.box(200, 82, "fuse:\none matrix", "part", 96, 44)
    for state in states:
        f.arrow(state.right, fuse.left)
    layer = f.box(350, 76, "decoder layer,\nKV cache of its own", "part", 150, 56)
    f.arrow(fuse.right, layer.left)
    token = f.box(402, 16, "x", "token")
    f.arrow(token.bottom, layer.top)
    head = f.box(552, 82, "own head", "part", 84, 44)
    f.arrow(layer.right, head.left)
    out = f.box(690, 90, "d1", "draft")
    f.arrow(head.right, out.left)
    f.arrow((470, 132), (380, 132), 196)
    f.note(352, 200, "the output is read in the next level")
    return f


def dflash() -> Figure:
    f = Figure("DFlash: states of the target become keys and values, one pass fills a block of masks", 230)
    states = f.row(16, 24, ["h1", "h2", "h3"], "state", 46, 34)
    context = f.box(16, 108, "keys and values\nof every layer", "part", 138, 44)
    for state in states:
        f.arrow(state.bottom, (state.bottom[0], 108))
    f.note(16, 176, "written once per token")
    block = f.row(290, 24, ["x", "mask", "mask", "mask"], "token", 56, 34)
    layers = f.box(270, 102, "decoder layers: every row of the\nblock sees all others", "part", 276, 56)
    for box in block:
        f.arrow(box.bottom, (box.bottom[0], 102))
    f.arrow(context.right, layers.left)
    head = f.box(590, 102, "target's\noutput matrix", "target", 110, 56)
    f.arrow(layers.right, head.left)
    drafts = f.row(570, 24, ["d1", "d2", "d3"], "draft", 50, 34)
    f.arrow(head.top, drafts[1].bottom)
    f.note(270, 186, "row j gives the distribution of draft token j")
    return f


def mtp() -> Figure:
    f = Figure("MTP: one more layer of the target reads a token and the normed hidden state before it", 236)
    f.note(16, 30, "token t + 1")
    f.note(16, 60, "state t")
    f.row(116, 10, ["x2", "x3", "x4"], "token", 46, 34)
    f.row(116 + 3 * 80, 10, ["d1", "d2"], "draft", 46, 34)
    states = f.row(116, 40, ["h1", "h2", "h3"], "state", 46, 34)
    own = f.row(116 + 3 * 80, 40, ["f4", "f5"], "part", 46, 34)
    layer = f.box(106, 114, "two norms, a projection, a layer of the target's class", "part", 386, 36)
    for state in [*states, *own]:
        f.arrow(state.bottom, (state.bottom[0], 114))
    head = f.box(552, 104, "target's\noutput matrix", "target", 110, 56)
    f.arrow(layer.right, head.left)
    out = f.box(584, 25, "d3", "draft")
    f.arrow(head.top, out.bottom)
    f.note(106, 180, "f4, f5: outputs of the layer after its norm; the same layer drafts every token")
    return f


def gemma4_assistant() -> Figure:
    f = Figure("Gemma-4 assistant: layers of queries alone read the target's own keys and values", 276)
    f.note(16, 30, "token")
    f.note(16, 60, "state before it")
    f.box(130, 10, "x", "token")
    state = f.box(130, 40, "h", "state")
    f.row(210, 10, ["d1", "d2"], "draft", 46, 34)
    own = f.row(210, 40, ["f1", "f2"], "part", 46, 34)
    layers = f.box(110, 124, "projection, layers of queries,\nall at the position of x", "part", 240, 52)
    for box in (state, *own):
        f.arrow(box.bottom, (box.bottom[0], 124))
    memory = f.box(400, 112, "target's KV cache:\nlast sliding layer,\nlast full layer", "target", 150, 76)
    f.arrow(memory.left, layers.right)
    head = f.box(590, 124, "own\noutput matrix", "part", 110, 52)
    f.arrow(layers.bottom, head.bottom, 225)
    out = f.box(620, 25, "d3", "draft")
    f.arrow(head.top, out.bottom)
    f.note(110, 238, "f1, f2: outputs of the assistant, projected to the width of the target")
    return f


def ensemble() -> Figure:
    f = Figure("Ensemble: a selector decides which members draft for a request, or merges their drafts", 250)
    text = f.box(16, 24, "member 1: suffix", "part", 150, 36)
    model = f.box(16, 124, "member 2: eagle3", "part", 150, 36)
    selector = f.box(262, 60, "selector:\nexpected tokens minus\nmeasured seconds", "part", 176, 68)
    f.arrow(text.right, selector.left)
    f.arrow(model.right, selector.left)
    root = f.box(494, 80, "x", "token")
    f.arrow(selector.right, root.left)
    a = f.box(572, 32, "sat", "draft")
    b = f.box(572, 128, "ran", "draft")
    c = f.box(650, 32, "on", "draft")
    d = f.box(650, 128, "off", "draft")
    f.arrow(root.right, a.left)
    f.arrow(root.right, b.left)
    f.arrow(a.right, c.left)
    f.arrow(b.right, d.left)
    f.note(474, 190, "one member's draft, or one merged tree")
    return f


FIGURES: dict[str, Callable[[], Figure]] = {
    draw.__name__: draw
    for draw in (
        ngram, suffix, lookahead, token_recycling, aggressive, ngram_lm, draft_model, early_exit, medusa, blockwise,
        mlp_speculator, hydra, chimera, eagle, eagle3, dflash, mtp, gemma4_assistant,
        ensemble,
    )
}  # fmt: skip

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        draw().save(Path(__file__).parent / f"{name}.svg")
