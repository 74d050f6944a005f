// Buttons and keys: playing, speed, one or two runs, theme, help.

const KEYS = [
  ["space", "play or stop"],
  ["← →", "step back, step on (shift: ten); ↑ ↓ on the map"],
  ["home end", "first and last step"],
  ["[ ]", "layer above, below"],
  ["h H", "next and previous head"],
  ["m", "mean over heads, then over layers"],
  ["j k", "next and previous position"],
  ["g", "to the main sink"],
  ["esc", "let go of the position"],
  ["s", "next sample"],
  ["t", "light or dark"],
  ["?", "this list"],
];

const controls = {
  setUp() {
    const by = (id) => document.getElementById(id);
    this.play = by("play");
    this.play.addEventListener("click", () => app.play(!app.playing));
    by("first").addEventListener("click", () => this.go(-Infinity));
    by("back").addEventListener("click", () => this.go(-1));
    by("on").addEventListener("click", () => this.go(1));
    by("last").addEventListener("click", () => this.go(Infinity));
    by("speed").addEventListener("change", (event) => (app.speed = Number(event.target.value)));
    by("theme").addEventListener("click", () => this.theme());
    by("help").addEventListener("click", () => this.help());
    this.setUpPair(by("pair"), by("linked"));
    by("keys").replaceChildren(
      ...KEYS.map(([keys, words]) => make("div", {}, make("dt", {}, ...keys.split(" ").map((key) => make("kbd", {}, key))), make("dd", {}, words))),
    );
    this.dialog = by("help-text");
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    by("close-help").addEventListener("click", () => this.dialog.close());
    this.drawScale();
    document.addEventListener("keydown", (event) => this.onKey(event));
    for (const query of ["(prefers-color-scheme: dark)", "print"]) {
      matchMedia(query).addEventListener("change", () => this.recolour());
    }
  },

  setUpPair(pair, linked) {
    pair.hidden = app.runs.length < 2;
    pair.addEventListener("click", () => app.arrange(app.panes.length === 1 ? 2 : 1));
    linked.addEventListener("change", () => (app.linked = linked.checked));
  },

  go(by) {
    const { pane } = app;
    app.goTo(pane, by === -Infinity ? 0 : by === Infinity ? pane.sample.T - 1 : pane.view.step + by);
  },

  draw() {
    this.play.setAttribute("aria-label", app.playing ? "Stop" : "Play");
    this.play.dataset.playing = app.playing;
    const two = app.panes.length > 1;
    document.getElementById("link").hidden = !two;
    document.getElementById("pair").textContent = two ? "one run" : "two runs";
    document.getElementById("panes").dataset.count = app.panes.length;
  },

  /** The colour scale of the page, once for everything that uses it. */
  drawScale() {
    const scale = document.getElementById("scale");
    const stops = colours.theme.scale.join(", ");
    const bar = make("i");
    // Set one by one: a policy may forbid styles that stand in markup.
    bar.style.background = `linear-gradient(to right, ${stops})`;
    const ticks = colours.ticks().map((value) => {
      const label = value === colours.low ? `≤ ${value}×` : `${value}×`;
      const tick = make("span", {}, label);
      tick.style.left = `${100 * colours.place(value)}%`;
      return tick;
    });
    scale.replaceChildren(bar, ...ticks);
  },

  theme() {
    document.documentElement.dataset.theme = colours.dark ? "light" : "dark";
    this.recolour();
    remember();
  },

  recolour() {
    colours.forget();
    this.drawScale();
    // At once: a printer does not wait for the next frame.
    app.draw();
  },

  help() {
    if (this.dialog.open) this.dialog.close();
    else this.dialog.showModal();
  },

  onKey(event) {
    const typing = event.target.closest?.("select, input:not([type=range]), textarea");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    // A focused button or summary keeps the keys that press it.
    if (event.target.closest?.("button, summary, a") && (event.key === " " || event.key === "Enter")) return;
    if (this.dialog.open && event.key !== "?") return;
    const action = this.actions()[event.key];
    if (!action) return;
    event.preventDefault();
    action(event);
  },

  actions() {
    const { pane } = app;
    const { view, sample } = pane;
    const head = (by) => app.look(pane, Math.max(view.layer, 0), ((view.head + 1 + by + sample.H + 1) % (sample.H + 1)) - 1);
    const move = (by) => pane.pin((Math.max(pane.key, 0) + by + sample.K) % sample.K);
    const ten = (event, by) => this.go(event.shiftKey ? 10 * by : by);
    return {
      " ": () => app.play(!app.playing),
      ArrowLeft: (event) => ten(event, -1),
      ArrowRight: (event) => ten(event, 1),
      Home: () => this.go(-Infinity),
      End: () => this.go(Infinity),
      "[": () => app.look(pane, view.layer - 1, view.head),
      "]": () => app.look(pane, view.layer + 1, view.head),
      h: () => head(1),
      H: () => head(-1),
      m: () => app.look(pane, view.head === MEAN ? ALL_LAYERS : view.layer, MEAN),
      j: () => move(1),
      k: () => move(-1),
      g: () => pane.pin(sample.mainOf(view.step, view.layer, view.head)),
      Escape: () => pane.pin(-1),
      s: () => app.choose(pane, (view.sample + 1) % sample.run.samples.length),
      t: () => this.theme(),
      "?": () => this.help(),
    };
  },
};
