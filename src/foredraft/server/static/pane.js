// Text of a run, token by token. New tokens are appended; existing ones are never redrawn.

export class Pane {
  #spans = [];
  #marked = [];
  #record = null;
  #current = -1;
  #pinned = -1;
  #onChoose;
  #onPin;

  // onChoose(token, span, record, isByKey): a token is under the pointer or reached by keys; onChoose(null): none is.
  // onPin(token, record, pane): a token is clicked, or Enter is pressed on it; onPin(null): the same again.
  constructor(root, { onChoose, onPin }) {
    this.root = root;
    this.#onChoose = onChoose;
    this.#onPin = onPin;
    root.addEventListener("pointerover", (event) => this.#point(event.target));
    root.addEventListener("pointerleave", () => this.choose(-1));
    root.addEventListener("click", (event) => this.#click(event));
    root.addEventListener("blur", () => this.choose(-1));
    root.addEventListener("scroll", () => this.#record && this.#marked.length && this.choose(-1), { passive: true });
    root.addEventListener("keydown", (event) => this.#walk(event));
  }

  // Starts over with the (empty) record of another run.
  show(record) {
    this.unpin();
    this.choose(-1);
    this.root.replaceChildren();
    this.#spans = [];
    this.#record = record;
    this.#current = -1;
  }

  // Appends the tokens that arrived since the last call; scrolls along if the end was in view.
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

  // Highlights a token and the other tokens of its pass; -1 = none.
  choose(index, isByKey = false) {
    for (const span of this.#marked) span.classList.remove("same", "here");
    this.#marked = [];
    const token = this.#record?.tokens[index];
    if (!token) {
      this.#onChoose(null); // the position for the keys does not change
      return;
    }
    this.#current = index;
    const current = this.#spans[index];
    const { pass } = token;
    this.#marked = pass ? this.#spans.slice(pass.first, pass.first + pass.tree.emitted.length) : [current];
    for (const span of this.#marked) span.classList.add("same");
    current.classList.add("here");
    this.#onChoose(token, current, this.#record, isByKey);
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
    if (!getSelection().isCollapsed) return; // the click ended a text selection
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
    this.#onPin(token?.pass ? token : null, this.#record, this);
  }

  // Moves by keys: left and right by tokens, up and down by passes, Home and End; Enter and space pin.
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
    const index = Math.min(this.#current, last);
    const pass = tokens[Math.max(index, 0)].pass;
    const nextPass = pass ? pass.first + pass.tree.emitted.length : index + 1;
    const previousPass = pass && pass.first > 0 ? (tokens[pass.first - 1].pass?.first ?? pass.first - 1) : 0;
    const goal = {
      ArrowRight: Math.min(index + 1, last),
      ArrowLeft: Math.max(index - 1, 0),
      ArrowDown: Math.min(Math.max(nextPass, 0), last),
      ArrowUp: previousPass,
      Home: 0,
      End: last,
    }[event.key];
    if (goal === undefined) return;
    event.preventDefault();
    this.#spans[goal].scrollIntoView({ block: "nearest" });
    requestAnimationFrame(() => this.choose(goal, true));
  }
}
