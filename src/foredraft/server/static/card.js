// Card beside the token under the pointer: the pass it came from, with draft tokens and output by depth.

import { depths, visible } from "./record.js";

const MAX_SIBLINGS = 6; // draft tokens listed per depth
const MAX_SIBLING_CHARS = 16; // characters of each
const ORIGIN_TEXT = {
  accepted: "accepted draft token",
  corrected: "the target's token, in place of a rejected draft token",
  bonus: "the target's token, after a draft that was accepted whole",
  plain: "the target's token; there was no draft",
};

function element(name, className, ...content) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...content);
  return node;
}

const styleOf = (origin) => (origin === "plain" || !origin ? "none" : origin);

export class Card {
  constructor(root, spoken) {
    this.root = root;
    this.spoken = spoken;
  }

  hide() {
    this.root.hidden = true;
  }

  show(token, span, record, drafter, isByKey) {
    const { pass } = token;
    const depth = pass ? record.tokens.indexOf(token, pass.first) - pass.first + 1 : 0;
    const head = element("p", "head");
    const label = element("span", `t ${styleOf(token.origin)}`, visible(token.piece));
    head.append(label, ` ${ORIGIN_TEXT[token.origin] ?? ""}`);
    this.root.replaceChildren(head);
    if (pass) this.#describe(pass, depth, token, record, drafter);
    this.root.hidden = false;
    this.#place(span.getBoundingClientRect(), span.parentElement.getBoundingClientRect());
    if (isByKey) this.spoken.textContent = this.#sentence(token, pass, depth);
  }

  // Appends the pass, its depth and, if it had a draft, a table of draft tokens and output by depth.
  #describe({ tree, first, number }, depth, token, record, drafter) {
    const numDrafted = tree.tokens.length - 1;
    const source = token.origin === "accepted" ? `proposed by ${drafter || "the drafter"}` : "chosen by the target";
    const line = `Pass ${number} · depth ${depth} · ${source}`;
    this.root.append(element("p", "muted", line));
    if (!numDrafted) return;
    const table = element("table", "");
    const row = (kind, ...cells) => table.append(element("tr", "", ...cells.map((cell) => element(kind, "", cell))));
    row("th", "depth", `drafted (${numDrafted})`, "text");
    const depthOf = depths(tree);
    const accepted = new Set(tree.accepted);
    for (let d = 1; d <= Math.max(...depthOf, tree.emitted.length); d++) {
      const output = record.tokens[first + d - 1];
      const hasOutput = d <= tree.emitted.length && output;
      const text = hasOutput ? element("span", `t ${styleOf(output.origin)}`, visible(output.piece)) : "";
      row("td", String(d), this.#siblings(tree, depthOf, accepted, d), text);
    }
    this.root.append(table);
  }

  // Lists the draft tokens of one depth, accepted ones first; rejected ones are struck through.
  #siblings(tree, depthOf, accepted, depth) {
    const cell = document.createDocumentFragment();
    const nodes = [...depthOf.keys()].filter((node) => depthOf[node] === depth);
    nodes.sort((a, b) => accepted.has(b) - accepted.has(a));
    for (const node of nodes.slice(0, MAX_SIBLINGS)) {
      const name = accepted.has(node) ? "b" : "s";
      cell.append(element(name, "", visible(tree.pieces[node], MAX_SIBLING_CHARS)), " ");
    }
    if (nodes.length > MAX_SIBLINGS) cell.append(`and ${nodes.length - MAX_SIBLINGS} more`);
    return cell;
  }

  // The card as one sentence, for screen readers.
  #sentence(token, pass, depth) {
    if (!pass) return `${token.piece}, ${token.origin ?? "text"}`;
    const { tree } = pass;
    const rejected = tree.pieces.filter((_, node) => node > 0 && !tree.accepted.includes(node));
    const ending = rejected.length ? `; rejected: ${rejected.slice(0, MAX_SIBLINGS).join(", ")}` : "";
    return `${token.piece}, ${token.origin}, pass ${pass.number}, depth ${depth}${ending}`;
  }

  // Positions the card below the token, or above it if it would reach beyond the pane or the window.
  #place(box, pane) {
    const { style, offsetWidth, offsetHeight } = this.root;
    const above = box.top - offsetHeight - 8;
    const below = box.bottom + 8;
    const end = below + offsetHeight;
    style.left = `${Math.max(8, Math.min(box.left, innerWidth - offsetWidth - 8))}px`;
    style.top = `${end <= Math.min(pane.bottom, innerHeight) || above < 8 ? below : above}px`;
  }
}
