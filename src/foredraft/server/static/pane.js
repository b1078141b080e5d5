// A run's text, token by token. Grows by appending; what stands is never drawn again.

export class Pane {
  #spans = [];
  #marked = [];
  #record = null;
  #current = -1;
  #pinned = -1;
  #chosen;
  #pin;

  // chosen(token, span, record, isByKey) when a token is pointed at or walked to; chosen(null) when it is left.
  // pin(token, record, pane) when a token is clicked, or Enter is pressed on it; pin(null) when it is again.
  constructor(root, { chosen, pin }) {
    this.root = root;
    this.#chosen = chosen;
    this.#pin = pin;
    root.addEventListener("pointerover", (event) => this.#point(event.target));
    root.addEventListener("pointerleave", () => this.choose(-1));
    root.addEventListener("click", (event) => this.#click(event));
    root.addEventListener("blur", () => this.choose(-1));
    root.addEventListener("scroll", () => this.#record && this.#marked.length && this.choose(-1), { passive: true });
    root.addEventListener("keydown", (event) => this.#walk(event));
  }

  show(record) {
    this.unpin();
    this.choose(-1);
    this.root.replaceChildren();
    this.#spans = [];
    this.#record = record;
    this.#current = -1;
  }

  draw() {
    const { root } = this;
    const tokens = this.#record?.tokens ?? [];
    if (this.#spans.length === tokens.length) return;
    const follows = root.scrollHeight - root.scrollTop - root.clientHeight < 24;
    const added = document.createDocumentFragment();
    for (let i = this.#spans.length; i < tokens.length; i++) {
      const span = document.createElement("span");
      const { origin, piece } = tokens[i];
      span.className = `t ${origin === "plain" || !origin ? "none" : origin}`;
      span.textContent = piece;
      span.index = i;
      added.append(span);
      this.#spans.push(span);
    }
    root.append(added);
    if (follows) root.scrollTop = root.scrollHeight;
  }

  choose(index, isByKey = false) {
    for (const span of this.#marked) span.classList.remove("same", "here");
    this.#marked = [];
    const token = this.#record?.tokens[index];
    if (!token) {
      this.#chosen(null); // where the keys stand is kept
      return;
    }
    this.#current = index;
    const here = this.#spans[index];
    const { pass } = token;
    this.#marked = pass ? this.#spans.slice(pass.first, pass.first + pass.tree.emitted.length) : [here];
    for (const span of this.#marked) span.classList.add("same");
    here.classList.add("here");
    this.#chosen(token, here, this.#record, isByKey);
  }

  unpin() {
    this.#spans[this.#pinned]?.classList.remove("pinned");
    this.#pinned = -1;
  }

  #point(target) {
    const span = target.closest?.(".t");
    this.choose(span ? span.index : -1);
  }

  #click(event) {
    if (!getSelection().isCollapsed) return; // text was selected
    const index = event.target.closest?.(".t")?.index ?? -1;
    this.#togglePin(index);
    this.choose(index);
  }

  #togglePin(index) {
    const token = index === this.#pinned ? null : this.#record?.tokens[index];
    this.unpin();
    if (token?.pass) {
      this.#pinned = index;
      this.#spans[index].classList.add("pinned");
    }
    this.#pin(token?.pass ? token : null, this.#record, this);
  }

  #walk(event) {
    const last = this.#spans.length - 1;
    if (last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.#togglePin(this.#current);
      this.choose(this.#current, true);
      return;
    }
    const tokens = this.#record.tokens;
    const at = Math.min(this.#current, last);
    const pass = tokens[Math.max(at, 0)].pass;
    const beyond = pass ? pass.first + pass.tree.emitted.length : at + 1;
    const before = pass && pass.first > 0 ? (tokens[pass.first - 1].pass?.first ?? pass.first - 1) : 0;
    const goal = {
      ArrowRight: Math.min(at + 1, last),
      ArrowLeft: Math.max(at - 1, 0),
      ArrowDown: Math.min(Math.max(beyond, 0), last),
      ArrowUp: before,
      Home: 0,
      End: last,
    }[event.key];
    if (goal === undefined) return;
    event.preventDefault();
    this.#spans[goal].scrollIntoView({ block: "nearest" });
    requestAnimationFrame(() => this.choose(goal, true));
  }
}
