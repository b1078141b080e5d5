// Line chart over seconds with up to two lines: the run, and plain decoding.

import { svg } from "./svg.js";

// Margins around the plot, in pixels.
const LEFT = 42;
const BOTTOM = 20;
const TOP = 8;
const RIGHT = 26;

// Computes the end of an axis from 0 to at least `max`, and about `count` ticks: 1, 2 or 5 times a power of ten apart.
function ticks(max, count) {
  const raw = Math.max(max, 1e-9) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw - 1e-12);
  const end = Math.ceil(max / step - 1e-9) * step;
  const marks = [];
  for (let i = 0; i * step <= end + step / 2; i++) marks.push(i * step);
  return { end, marks, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

// Computes the marks of an axis from `first` to `last`, at least two: 1, 2 or 5 times a power of ten apart.
function marksBetween(first, last, count) {
  const raw = (last - first) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [5, 2, 1].map((factor) => factor * power).find((size) => size <= raw + 1e-12) ?? power;
  const marks = [];
  for (let i = Math.ceil(first / step - 1e-9); i * step <= last + step * 1e-9; i++) marks.push(i * step);
  return { first, last, marks, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

// Time axis from the first point to the last. The time before the first point has no line and is left out.
function timeAxis(points, width) {
  const times = points.map((point) => point[0]);
  const first = times.length ? Math.min(...times) : 0;
  return marksBetween(first, Math.max(first + 0.01, ...(times.length ? times : [0.1])), Math.max(2, Math.floor(width / 120)));
}

export class Chart {
  // lowest: smallest end of the value axis, so that a chart without data has an axis
  constructor(root, name, lowest) {
    this.root = root;
    this.lowest = lowest;
    this.axes = svg("g", { class: "axes" });
    this.lines = ["plain", "main"].map((kind) => svg("path", { class: `line ${kind}` }));
    this.picture = svg("svg", { role: "img", "aria-label": name }, this.axes, ...this.lines);
    root.append(this.picture);
    this.data = [[], []];
    new ResizeObserver(() => this.draw(...this.data)).observe(root);
  }

  // Draws both lines. main, plain: points [seconds, value].
  draw(main, plain) {
    this.data = [main, plain];
    const { clientWidth: width, clientHeight: height } = this.root;
    if (width < 60 || height < 50) return;
    const all = [...main, ...plain].filter((point) => Number.isFinite(point[1]));
    const x = timeAxis(all, width);
    const y = ticks(Math.max(this.lowest, ...all.map((point) => point[1])), Math.max(2, Math.floor(height / 45)));
    const toX = (value) => LEFT + ((value - x.first) / (x.last - x.first)) * (width - LEFT - RIGHT);
    const toY = (value) => height - BOTTOM - (value / y.end) * (height - BOTTOM - TOP);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.#drawAxes(x, y, toX, toY, width, height);
    [plain, main].forEach((points, i) => {
      const finite = points.filter((point) => Number.isFinite(point[1]));
      const path = finite.map(([s, value], k) => `${k ? "L" : "M"}${toX(s).toFixed(1)} ${toY(value).toFixed(1)}`);
      this.lines[i].setAttribute("d", path.join(""));
    });
  }

  #drawAxes(x, y, toX, toY, width, height) {
    const axesKey = `${x.first} ${x.last} ${y.end} ${width} ${height}`;
    if (axesKey === this.axesKey) return; // the axes are unchanged
    this.axesKey = axesKey;
    const text = (value, axis, attributes) => svg("text", attributes, value.toFixed(axis.digits));
    const marks = y.marks.flatMap((value) => [
      svg("line", { x1: LEFT, x2: width - RIGHT, y1: toY(value), y2: toY(value) }),
      text(value, y, { x: LEFT - 6, y: toY(value) + 4, "text-anchor": "end" }),
    ]);
    const seconds = x.marks.map((value) => {
      const label = text(value, x, { x: toX(value), y: height - 4, "text-anchor": "middle" });
      label.append(value === x.marks.at(-1) ? " s" : "");
      return label;
    });
    this.axes.replaceChildren(...marks, ...seconds);
  }
}
