// What is chosen, and by which road: panes hold a view each, changes are drawn once per frame.

const app = {
  panes: [],
  runs: [],
  active: 0,
  linked: true,
  playing: false,
  speed: 1,
  metric: 0,
  timer: 0,

  /** Draws every pane at the next frame, however many things change until then. */
  paint() {
    this.frame ??= requestAnimationFrame(() => this.draw());
  },

  draw() {
    this.frame = null;
    for (const pane of this.panes) pane.draw();
    controls.draw();
  },

  others(pane) {
    return this.linked ? this.panes.filter((other) => other !== pane && other.sample) : [];
  },

  /** Keeps the first panes, so many. */
  keep(count) {
    while (this.panes.length > count) this.panes.pop().element.remove();
  },

  /** Adds a pane, which looks where the first one does. */
  add(pane) {
    Object.assign(pane.view, this.panes[0]?.view);
    by("panes").append(pane.element);
    this.panes.push(pane);
    return pane;
  },

  /** Moves a pane to a step; linked panes go to the same part of their way. */
  goTo(pane, step) {
    pane.view.step = clamp(step, pane.sample.T - 1);
    for (const other of this.others(pane)) other.view.step = along(pane.view.step, pane.sample.T, other.sample.T);
    this.changed(pane);
  },

  /** Chooses layer and head; linked panes follow to the layer of the same depth, and to the head if they have it. */
  look(pane, layer, head) {
    const { L, H } = pane.sample;
    pane.view.layer = Math.min(Math.max(layer, ALL_LAYERS), L - 1);
    pane.view.head = pane.view.layer === ALL_LAYERS ? MEAN : Math.min(Math.max(head, MEAN), H - 1);
    for (const other of this.others(pane)) {
      other.view.layer = along(pane.view.layer, L, other.sample.L);
      other.view.head = pane.view.head < other.sample.H ? pane.view.head : MEAN;
    }
    this.changed(pane);
  },

  /** Chooses a sample; linked panes follow to the sample of the same number, if they have it. */
  async choose(pane, place) {
    await pane.show(pane.view.run, place);
    for (const other of this.others(pane)) {
      const same = other.sample.run.samples.findIndex((sample) => sample.raw.index === pane.sample.raw.index);
      if (same >= 0) await other.show(other.view.run, same);
    }
    this.changed(pane);
  },

  changed(pane) {
    this.active = this.panes.indexOf(pane);
    this.paint();
    remember();
  },

  play(on) {
    clearTimeout(this.timer);
    this.playing = on;
    if (on) {
      const pane = this.longest();
      if (pane.view.step >= pane.sample.T - 1) this.goTo(pane, 0);
      this.schedule();
    }
    this.paint();
  },

  schedule() {
    this.timer = setTimeout(() => {
      const pane = this.longest();
      if (pane.view.step >= pane.sample.T - 1) return this.play(false);
      this.goTo(pane, pane.view.step + 1);
      return this.schedule();
    }, 400 / this.speed);
  },

  /** The pane with most steps leads, so that linked playing shows every step of both. */
  longest() {
    if (!this.linked) return this.panes[this.active];
    return this.panes.reduce((best, pane) => (pane.sample.T > best.sample.T ? pane : best));
  },
};

/** The place in a row of `to` that lies as far along as this one in a row of `from`; none, below 0, stays none. */
function along(at, from, to) {
  return at > 0 ? Math.round((at / (from - 1)) * (to - 1)) : at;
}

/** Keeps the view in the address, so that it can be shared, or found again after reloading. */
let rememberTimer = 0;
function remember() {
  clearTimeout(rememberTimer);
  rememberTimer = setTimeout(() => {
    const fields = Object.keys(app.panes[0].view).map((name) => `${name}=${app.panes.map((pane) => pane.view[name])}`);
    const theme = document.documentElement.dataset.theme;
    if (theme) fields.push(`theme=${theme}`);
    try {
      history.replaceState(null, "", `#${fields.join("&")}`);
    } catch {
      // A page inside a sandboxed frame has no history of its own; it works without.
    }
  }, 250);
}

function recalled() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const numbers = (text) => text.split(",").filter(Boolean).map(Number).filter(Number.isInteger);
  return { theme: fields.get("theme"), wanted: Object.fromEntries([...fields].map(([name, text]) => [name, numbers(text)])) };
}
