// The canvas as text: background is received attention, style is the state, an outline is the main sink.

const MASK_SIGN = "░";

class Player {
  constructor(pane) {
    this.pane = pane;
    this.box = pane.find(".canvas-text");
    const onToken = (kind, does) => {
      this.box.addEventListener(kind, (event) => {
        const { key } = event.target.dataset;
        if (key !== undefined) does(Number(key), event);
      });
    };
    onToken("pointerover", (key, event) => event.pointerType === "touch" || pane.glance(null, key));
    onToken("click", (key) => pane.pin(key === pane.view.key ? -1 : key));
    this.box.addEventListener("pointerleave", () => pane.glance(null, null));
  }

  build() {
    const { sample } = this.pane;
    this.spans = [];
    this.states = new Array(sample.K).fill("");
    for (let key = 0; key < sample.K; key++) {
      const name = sample.added > 1 ? `sink ${key + 1}` : "sink";
      this.spans.push(make("span", { "data-key": key }, key < sample.added ? name : ""));
    }
    this.box.replaceChildren(...this.spans);
    this.shown = sample;
  }

  draw() {
    const { sample, view } = this.pane;
    if (this.shown !== sample) this.build();
    const codes = sample.plane(view.layer, view.head);
    const table = colours.table(sample);
    const marks = this.marks();
    for (let key = 0; key < sample.K; key++) this.drawToken(key, table[codes[view.step * sample.K + key]], marks[key]);
    this.follow();
    // What is before the last step is not what was written in the end.
    const end = this.pane.find(".finished");
    end.hidden = view.step < sample.T - 1 || !sample.raw.final;
    end.textContent = `After the last step: ${runningText(sample.raw.final ?? "")}`;
  }

  drawToken(key, { css, ink, plain }, marks) {
    const { sample, view } = this.pane;
    const position = key - sample.added;
    const age = sample.age(view.step, position);
    const token = sample.token(view.step, position);
    const isMasked = age === "masked";
    const text = isMasked ? MASK_SIGN : token ? runningText(token[1]) : "";
    const names = `${age.replace(" ", "-")} ${token?.[3] && !isMasked ? "special" : ""} ${marks ?? ""}`;
    const state = [css, names, text].join("/");
    // Most tokens do not change from one step to the next.
    if (state === this.states[key]) return;
    this.states[key] = state;
    const span = this.spans[key];
    span.hidden = age === "";
    span.className = names;
    if (position >= 0) span.textContent = text;
    span.style.backgroundColor = plain ? "" : css;
    // Masks are many and say little: they stay pale on every background.
    span.style.color = plain ? "" : isMasked ? `color-mix(in srgb, ${ink} 55%, ${css})` : ink;
  }

  /** Classes of the keys that stand out, by key. */
  marks() {
    const { hover, sample, view } = this.pane;
    const keys = { main: [sample.mainOf(view.step, view.layer, view.head)], pinned: [view.key], looked: [hover.key], blocked: sample.hatched(view.step, view) };
    const marks = {};
    for (const [name, some] of Object.entries(keys)) for (const key of some) marks[key] = `${marks[key] ?? ""} ${name}`;
    return marks;
  }

  /** Brings into sight what was pinned elsewhere, and while playing what is being written. */
  follow() {
    const { pane } = this;
    const fresh = app.playing ? this.box.querySelector(".just-committed") : null;
    const span = pane.view.key >= 0 && pane.view.key !== this.followed ? this.spans[pane.view.key] : fresh;
    this.followed = pane.view.key;
    if (!span) return;
    const top = span.offsetTop - this.box.offsetTop;
    const { scrollTop, clientHeight } = this.box;
    // Only the box scrolls: scrollIntoView would move the whole page.
    if (top < scrollTop || top + span.offsetHeight > scrollTop + clientHeight) this.box.scrollTop = top - clientHeight / 2;
  }
}
