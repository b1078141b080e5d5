// Token tree of one pass: depth runs to the right; accepted nodes are solid, rejected ones faint and struck through.

import { depths, visible } from "./record.js";
import { svg } from "./svg.js";

// Sizes in pixels.
const LETTER = 7.3; // width of a monospaced letter at 12 px
const HEIGHT = 24; // height of a node
const ROW = 32; // distance of two rows
const GAP = 26; // space between two depths
const PAD = 10; // margin of the picture
const MAX_LABEL_CHARS = 14;

// Assigns rows to nodes: a leaf takes the next row, a parent the row of its first child.
// Accepted children come first, so that the accepted path is a straight line.
function rows(children, isAccepted) {
  const result = [];
  let next = 0;
  const visit = (node) => {
    const sorted = [...children[node]].sort((a, b) => isAccepted(b) - isAccepted(a));
    if (!sorted.length) result[node] = next++;
    sorted.forEach(visit);
    if (sorted.length) result[node] = result[sorted[0]];
  };
  visit(0);
  return result;
}

// Lists the nodes to draw: those of the tree, and the target's token after the last accepted node.
function nodesOf({ tree, first }, record) {
  const accepted = new Set(tree.accepted);
  const nodes = tree.pieces.map((piece, node) => ({
    label: visible(piece, MAX_LABEL_CHARS),
    title: piece,
    parent: tree.parents[node],
    kind: node === 0 ? "root" : accepted.has(node) ? "accepted" : "rejected",
  }));
  const last = record.tokens[first + tree.emitted.length - 1];
  if (last && last.origin !== "accepted") {
    const label = visible(last.piece, MAX_LABEL_CHARS);
    nodes.push({ label, title: last.piece, parent: tree.accepted.at(-1) ?? 0, kind: last.origin });
  }
  return nodes;
}

// Sets x, y and width of every node; returns the size of the picture.
function layOut(nodes) {
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => node.parent >= 0 && children[node.parent].push(i));
  const row = rows(children, (i) => nodes[i].kind !== "rejected");
  const depth = depths({ parents: nodes.map((node) => node.parent) });
  const widths = [];
  nodes.forEach((node, i) => {
    node.width = Math.max(24, [...node.label].length * LETTER + 14);
    widths[depth[i]] = Math.max(widths[depth[i]] ?? 0, node.width);
  });
  nodes.forEach((node, i) => {
    node.x = PAD + widths.slice(0, depth[i]).reduce((sum, width) => sum + width + GAP, 0);
    node.y = PAD + row[i] * ROW;
  });
  const right = PAD + widths.reduce((sum, width) => sum + width + GAP, 0) - GAP + PAD;
  return { width: right, height: PAD * 2 + Math.max(...row) * ROW + HEIGHT };
}

function edge(from, to) {
  const [x1, y1, x2, y2] = [from.x + from.width, from.y + HEIGHT / 2, to.x, to.y + HEIGHT / 2];
  const bend = GAP / 2;
  return svg("path", { class: `edge ${to.kind}`, d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` });
}

function box(node) {
  const group = svg("g", { class: `node ${node.kind}`, transform: `translate(${node.x} ${node.y})` });
  group.append(
    svg("title", {}, `${node.kind}: ${node.title}`),
    svg("rect", { width: node.width, height: HEIGHT, rx: 5 }),
    svg("text", { x: node.width / 2, y: HEIGHT / 2 + 4, "text-anchor": "middle" }, node.label),
  );
  const middle = HEIGHT / 2;
  if (node.kind === "rejected") group.append(svg("line", { class: "strike", x1: 5, x2: node.width - 5, y1: middle, y2: middle }));
  return group;
}

export function drawTree(root, pass, record) {
  if (!pass) {
    root.replaceChildren();
    return;
  }
  const nodes = nodesOf(pass, record);
  const { width, height } = layOut(nodes);
  const scale = Math.max(0.6, Math.min(1, root.clientWidth / width, root.clientHeight / height));
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width: Math.round(width * scale),
    height: Math.round(height * scale),
    role: "img",
    "aria-label": describe(pass),
  });
  for (const node of nodes) if (node.parent >= 0) picture.append(edge(nodes[node.parent], node));
  for (const node of nodes) picture.append(box(node));
  root.replaceChildren(picture);
}

export function describe({ tree }) {
  const numDrafted = tree.tokens.length - 1;
  return numDrafted ? `${tree.accepted.length - 1} of ${numDrafted} tokens accepted` : "no draft";
}
