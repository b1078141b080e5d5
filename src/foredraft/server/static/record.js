// Record of a run: its tokens, the pass of each, and their arrival times. Independent of the page.

export const ORIGINS = ["accepted", "corrected", "bonus", "plain"];

export class Record {
  constructor() {
    this.tokens = []; // {piece, origin, pass}: origin is null if the server sent none, pass is null without a trace
    this.passes = []; // {tree, first, number}: emitted tokens first .. first + tree.emitted.length - 1
    this.lastDraftedPass = null; // last pass that had a draft
    this.counts = { accepted: 0, corrected: 0, bonus: 0, plain: 0 };
    this.arrivals = []; // {seconds, tokens, passes}: cumulative counts at every chunk
    this.numTokens = 0;
    this.finish = null;
    this.started = performance.now();
    this.text = "";
  }

  add(chunk) {
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const trace = choice.foredraft_trace;
    const text = choice.text ?? choice.delta?.content ?? "";
    if (trace) this.#addTraced(trace);
    else if (text) this.tokens.push({ piece: text, origin: null, pass: null });
    this.text += trace ? trace.pieces.join("") : text;
    if (!trace?.origins.length) return;
    const seconds = (performance.now() - this.started) / 1000;
    this.arrivals.push({ seconds, tokens: this.numTokens, passes: this.passes.length });
  }

  #addTraced({ origins, pieces, steps = [] }) {
    let first = this.tokens.length;
    const passOf = []; // pass of every emitted token
    for (const tree of steps) {
      const pass = { tree, first, number: this.passes.length + 1 };
      this.passes.push(pass);
      if (tree.tokens.length > 1) this.lastDraftedPass = pass;
      for (let i = 0; i < tree.emitted.length; i++) passOf.push(pass);
      first += tree.emitted.length;
    }
    pieces.forEach((piece, i) => {
      const origin = origins[i] ?? null; // text that was held back for a stop string arrives without a token
      if (origin) {
        this.counts[origin]++;
        this.numTokens++;
      }
      this.tokens.push({ piece, origin, pass: passOf[i] ?? null });
    });
  }

  get seconds() {
    return this.arrivals.at(-1)?.seconds ?? 0;
  }

  get figures() {
    const { numTokens: tokens, passes, seconds } = this;
    return {
      tokens,
      passes: passes.length,
      length: passes.length ? tokens / passes.length : NaN,
      rate: seconds ? tokens / seconds : NaN,
      first: this.arrivals[0]?.seconds ?? NaN,
      total: seconds || NaN,
    };
  }

  // Computes points [seconds, tokens per pass, tokens per second] over a window that slides along the run.
  series(numPoints = 80) {
    const list = this.arrivals;
    if (list.length < 3) return [];
    const begin = list[0].seconds;
    const span = list.at(-1).seconds - begin;
    const width = Math.max(span / 8, Math.min(span / 2, 0.1));
    const points = [];
    let left = 0;
    let right = 0;
    for (let i = 0; i <= numPoints; i++) {
      const end = begin + width + ((span - width) * i) / numPoints;
      while (right + 1 < list.length && list[right + 1].seconds <= end) right++;
      while (list[left + 1].seconds <= end - width && left + 1 < right) left++;
      const tokens = list[right].tokens - list[left].tokens;
      const passes = list[right].passes - list[left].passes;
      const seconds = list[right].seconds - list[left].seconds;
      if (seconds > 0) points.push([end, passes ? tokens / passes : NaN, tokens / seconds]);
    }
    return points;
  }
}

// Computes the depth of every node of a pass's tree. The root, the last token before the pass, has depth 0.
export function depths(tree) {
  const result = [];
  tree.parents.forEach((parent, node) => result.push(parent < 0 ? 0 : result[parent] + 1));
  return result;
}

// Formats a token as a label of at most `maxChars` characters, with visible white space.
export function visible(piece, maxChars = 24) {
  const label = piece.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·") || "∅";
  const chars = [...label];
  return chars.length > maxChars ? `${chars.slice(0, maxChars - 1).join("")}…` : label;
}
