// Buttons and keys: playing, speed, one or two runs, theme, help.

const controls = {
  setUp() {
    // A button does what its key does.
    for (const button of document.querySelectorAll("[data-press]")) {
      button.addEventListener("click", (event) => this.action(button.dataset.press)(event));
    }
    by("pair").addEventListener("click", () => app.arrange(app.panes.length === 1 ? 2 : 1));
    by("speed").addEventListener("change", (event) => (app.speed = Number(event.target.value)));
    by("pair").hidden = app.runs.length < 2;
    by("linked").addEventListener("change", (event) => (app.linked = event.target.checked));
    by("keys").replaceChildren(
      ...this.shortcuts().map(([keys, words]) => make("div", {}, make("dt", {}, ...keys.split(" ").map((key) => make("kbd", {}, key))), make("dd", {}, words))),
    );
    this.help = by("help-text");
    this.drawScale();
    document.addEventListener("keydown", (event) => this.onKey(event));
    for (const query of ["(prefers-color-scheme: dark)", "print"]) {
      matchMedia(query).addEventListener("change", () => this.recolour());
    }
  },

  draw() {
    const play = by("play");
    play.setAttribute("aria-label", app.playing ? "Stop" : "Play");
    play.dataset.playing = app.playing;
    const two = app.panes.length > 1;
    by("link").hidden = !two;
    by("pair").textContent = two ? "one run" : "two runs";
    by("panes").dataset.count = app.panes.length;
  },

  /** The colour scale of the page, once for everything that uses it. */
  drawScale() {
    const bar = make("i");
    // Set one by one: a policy may forbid styles that stand in markup.
    bar.style.background = `linear-gradient(to right, ${colours.scale})`;
    const ticks = colours.ticks().map((value) => {
      const label = value === colours.low ? `≤ ${value}×` : `${value}×`;
      const tick = make("span", {}, label);
      tick.style.left = `${100 * colours.place(value)}%`;
      return tick;
    });
    by("scale").replaceChildren(bar, ...ticks);
  },

  theme() {
    document.documentElement.dataset.theme = colours.dark ? "light" : "dark";
    this.recolour();
    remember();
  },

  recolour() {
    colours.cache.clear();
    this.drawScale();
    // At once: a printer does not wait for the next frame.
    app.draw();
  },

  onKey(event) {
    const typing = event.target.closest?.("select, input:not([type=range]), textarea");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    // A focused button or summary keeps the keys that press it.
    if (event.target.closest?.("button, summary, a") && (event.key === " " || event.key === "Enter")) return;
    if (this.help.matches(":popover-open") && event.key !== "?") return;
    const action = this.action(event.key);
    if (!action) return;
    event.preventDefault();
    action(event);
  },

  action(key) {
    return Object.assign({}, ...this.shortcuts().map(([, , does]) => does))[key];
  },

  /** The keys: how they are listed, what they do in words, and what each does. */
  shortcuts() {
    const pane = app.panes[app.active];
    const { view, sample } = pane ?? { view: {} };
    const head = (by) => app.look(pane, Math.max(view.layer, 0), ((view.head + 1 + by + sample.H + 1) % (sample.H + 1)) - 1);
    const move = (by) => pane.pin((Math.max(pane.key, 0) + by + sample.K) % sample.K);
    const go = (by) => (event) => app.goTo(pane, view.step + (event.shiftKey ? 10 * by : by));
    const layer = (by) => () => app.look(pane, view.layer + by, view.head);
    const mean = () => app.look(pane, view.head === MEAN ? ALL_LAYERS : view.layer, MEAN);
    return [
      ["space", "play or stop", { " ": () => app.play(!app.playing) }],
      ["← →", "step back, step on (shift: ten); ↑ ↓ on the map", { ArrowLeft: go(-1), ArrowRight: go(1) }],
      ["home end", "first and last step", { Home: go(-Infinity), End: go(Infinity) }],
      ["[ ]", "layer above, below", { "[": layer(-1), "]": layer(1) }],
      ["h H", "next and previous head", { h: () => head(1), H: () => head(-1) }],
      ["m", "mean over heads, then over layers", { m: mean }],
      ["j k", "next and previous position", { j: () => move(1), k: () => move(-1) }],
      ["g", "to the main sink", { g: () => pane.pin(sample.mainOf(view.step, view.layer, view.head)) }],
      ["esc", "let go of the position", { Escape: () => pane.pin(-1) }],
      ["s", "next sample", { s: () => app.choose(pane, (view.sample + 1) % sample.run.samples.length) }],
      ["t", "light or dark", { t: () => this.theme() }],
      ["?", "this list", { "?": () => this.help.togglePopover() }],
    ];
  },
};
