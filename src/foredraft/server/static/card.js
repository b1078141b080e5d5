// What a pass did, beside the token that is pointed at: per depth what was drafted and what became of it.

import { depths, visible } from "./record.js";

const MOST_SIBLINGS = 6;
const SAID = {
  accepted: "drafted and kept",
  corrected: "the target's own token, in place of a rejected draft",
  bonus: "the target's own token, after a draft that was kept whole",
  plain: "the target's own token; nothing was drafted",
};

function element(name, className, ...content) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...content);
  return made;
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
    head.append(element("span", `t ${styleOf(token.origin)}`, visible(token.piece)), ` ${SAID[token.origin] ?? ""}`);
    this.root.replaceChildren(head);
    if (pass) this.#describe(pass, depth, token, record, drafter);
    this.root.hidden = false;
    this.#place(span.getBoundingClientRect(), span.parentElement.getBoundingClientRect());
    if (isByKey) this.spoken.textContent = this.#sentence(token, pass, depth);
  }

  #describe({ tree, first, number }, depth, token, record, drafter) {
    const drafted = tree.tokens.length - 1;
    const who = token.origin === "accepted" ? `proposed by ${drafter || "the drafter"}` : "chosen by the target";
    const line = `Pass ${number} · depth ${depth} · ${who}`;
    this.root.append(element("p", "muted", line));
    if (!drafted) return;
    const table = element("table", "");
    const row = (kind, ...cells) => table.append(element("tr", "", ...cells.map((cell) => element(kind, "", cell))));
    row("th", "depth", `drafted (${drafted})`, "text");
    const depthOf = depths(tree);
    const kept = new Set(tree.accepted);
    for (let d = 1; d <= Math.max(...depthOf, tree.emitted.length); d++) {
      const said = record.tokens[first + d - 1];
      const isSaid = d <= tree.emitted.length && said;
      const text = isSaid ? element("span", `t ${styleOf(said.origin)}`, visible(said.piece)) : "";
      row("td", String(d), this.#siblings(tree, depthOf, kept, d), text);
    }
    this.root.append(table);
  }

  #siblings(tree, depthOf, kept, depth) {
    const cell = document.createDocumentFragment();
    const nodes = [...depthOf.keys()].filter((node) => depthOf[node] === depth);
    nodes.sort((a, b) => kept.has(b) - kept.has(a));
    for (const node of nodes.slice(0, MOST_SIBLINGS)) {
      const name = kept.has(node) ? "b" : "s";
      cell.append(element(name, "", visible(tree.pieces[node], 16)), " ");
    }
    if (nodes.length > MOST_SIBLINGS) cell.append(`and ${nodes.length - MOST_SIBLINGS} more`);
    return cell;
  }

  #sentence(token, pass, depth) {
    if (!pass) return `${token.piece}, ${token.origin ?? "text"}`;
    const { tree } = pass;
    const rejected = tree.pieces.filter((_, node) => node > 0 && !tree.accepted.includes(node));
    const ending = rejected.length ? `; rejected: ${rejected.slice(0, MOST_SIBLINGS).join(", ")}` : "";
    return `${token.piece}, ${token.origin}, pass ${pass.number}, depth ${depth}${ending}`;
  }

  // Below the token; above it where that would hide what stands below the pane.
  #place(box, pane) {
    const { style, offsetWidth, offsetHeight } = this.root;
    const above = box.top - offsetHeight - 8;
    const below = box.bottom + 8;
    const end = below + offsetHeight;
    style.left = `${Math.max(8, Math.min(box.left, innerWidth - offsetWidth - 8))}px`;
    style.top = `${end <= Math.min(pane.bottom, innerHeight) || above < 8 ? below : above}px`;
  }
}
