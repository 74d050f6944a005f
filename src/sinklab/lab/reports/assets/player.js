// The canvas as text: background is received attention, style is the state, an outline is the main sink.

const MASK_SIGN = "░";

class Player {
  constructor(pane) {
    this.pane = pane;
    this.box = pane.find(".canvas-text");
    this.shown = null;
    this.box.addEventListener("pointerover", (event) => this.onPointer(event));
    this.box.addEventListener("pointerleave", () => pane.glance(null, null));
    this.box.addEventListener("click", (event) => {
      const key = this.keyAt(event.target);
      if (key !== null) pane.pin(key === pane.pinned ? -1 : key);
    });
  }

  keyAt(target) {
    const key = target.dataset?.key;
    return key === undefined ? null : Number(key);
  }

  onPointer(event) {
    const key = this.keyAt(event.target);
    if (key !== null && event.pointerType !== "touch") this.pane.glance(null, key);
  }

  build() {
    const { sample } = this.pane;
    this.spans = [];
    this.states = new Array(sample.K).fill("");
    for (let key = 0; key < sample.K; key++) {
      const span = make("span", { "data-key": key });
      if (key < sample.added) {
        span.textContent = sample.added > 1 ? `sink ${key + 1}` : "sink";
        span.className = "added";
      }
      this.spans.push(span);
    }
    this.box.replaceChildren(...this.spans);
    this.shown = sample;
    this.marked = [];
    this.dark = colours.dark;
  }

  draw() {
    const { sample, view } = this.pane;
    if (this.shown !== sample) this.build();
    const codes = sample.plane(view.layer, view.head);
    const table = colours.table(sample);
    if (this.dark !== colours.dark) this.states.fill("");
    this.dark = colours.dark;
    for (let key = 0; key < sample.K; key++) this.drawToken(key, codes[view.step * sample.K + key], table);
    this.mark();
    // What is before the last step is not what was written in the end.
    const end = this.pane.find(".finished");
    end.hidden = view.step < sample.T - 1 || !sample.raw.final;
    end.textContent = `After the last step: ${runningText(sample.raw.final ?? "")}`;
  }

  drawToken(key, code, table) {
    const { sample, view } = this.pane;
    const position = key - sample.added;
    const age = position < 0 ? "added" : sample.age(view.step, position);
    const token = position < 0 ? null : sample.token(view.step, position);
    const state = `${code}/${age}/${token ? token[1] : ""}`;
    // Most tokens do not change from one step to the next.
    if (state === this.states[key]) return;
    this.states[key] = state;
    const span = this.spans[key];
    span.hidden = age === "";
    if (position >= 0) {
      span.textContent = age === "masked" ? MASK_SIGN : token ? runningText(token[1]) : "";
      span.className = age.replace(" ", "-") + (token && token[3] && age !== "masked" ? " special" : "");
    }
    const { css, ink, plain } = table[code];
    span.style.backgroundColor = plain ? "" : css;
    // Masks are many and say little: they stay pale on every background.
    span.style.color = plain ? "" : age === "masked" ? `color-mix(in srgb, ${ink} 55%, ${css})` : ink;
  }

  mark() {
    const { pane } = this;
    const { sample, view } = pane;
    for (const span of this.marked) span.classList.remove("main", "looked", "pinned", "blocked");
    this.marked = [];
    const add = (key, name) => {
      if (key === null || key < 0 || key >= sample.K) return;
      this.spans[key].classList.add(name);
      this.marked.push(this.spans[key]);
    };
    add(sample.mainOf(view.step, view.layer, view.head), "main");
    add(pane.pinned, "pinned");
    add(pane.hover.key, "looked");
    for (const key of sample.hatched(view.step, view)) add(key, "blocked");
    this.follow();
  }

  /** Brings into sight what was pinned elsewhere, and while playing what is being written. */
  follow() {
    const { pane } = this;
    const fresh = app.playing ? this.box.querySelector(".just-committed") : null;
    const span = pane.pinned >= 0 && pane.pinned !== this.followed ? this.spans[pane.pinned] : fresh;
    this.followed = pane.pinned;
    if (!span) return;
    const top = span.offsetTop - this.box.offsetTop;
    const { scrollTop, clientHeight } = this.box;
    // Only the box scrolls: scrollIntoView would move the whole page.
    if (top < scrollTop || top + span.offsetHeight > scrollTop + clientHeight) this.box.scrollTop = top - clientHeight / 2;
  }
}
