// One run on the screen: its sample, its view, and the parts that draw them.

class Pane {
  constructor(index) {
    this.index = index;
    this.element = by("pane").content.firstElementChild.cloneNode(true);
    this.view = { run: 0, sample: 0, step: 0, layer: ALL_LAYERS, head: MEAN, key: -1 };
    this.hover = { step: null, key: null };
    this.parts = [Player, HeatMap, HeadMap, Readout].map((Part) => new Part(this));
    this.setUpChoices();
    this.element.addEventListener("pointerdown", () => (app.active = this.index));
    this.element.addEventListener("focusin", () => (app.active = this.index));
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  setUpChoices() {
    const onChange = (selector, then) => {
      this.find(selector).addEventListener("change", (event) => then(Number(event.target.value)));
    };
    onChange(".choose-run", (run) => this.show(run, 0));
    onChange(".choose-sample", (sample) => app.choose(this, sample));
    onChange(".choose-layer", (layer) => app.look(this, layer, this.view.head));
    onChange(".choose-head", (head) => app.look(this, Math.max(this.view.layer, 0), head));
    this.find(".step").addEventListener("input", (event) => app.goTo(this, Number(event.target.value)));
  }

  /** Shows a sample of a run; what was chosen stays where the new one has it. */
  async show(run, sample) {
    const shown = app.runs[run].samples[sample] ?? app.runs[run].samples[0];
    this.wanted = shown;
    this.element.ariaBusy = "true";
    await shown.open();
    // Another may have been asked for while this one was unpacked.
    if (this.wanted !== shown) return;
    this.element.ariaBusy = "false";
    const before = this.sample;
    this.sample = shown;
    this.view.run = run;
    this.view.sample = shown.run.samples.indexOf(shown);
    if (before && before.run !== shown.run && before.L !== shown.L) this.view.layer = shown.run.first_layer;
    this.view.step = clamp(this.view.step, shown.T - 1);
    this.view.layer = Math.max(Math.min(this.view.layer, shown.L - 1), ALL_LAYERS);
    if (this.view.head >= shown.H) this.view.head = MEAN;
    this.hover = { step: null, key: null };
    if (this.view.key >= shown.K) this.view.key = -1;
    this.element.dataset.family = shown.run.family;
    this.element.dataset.added = shown.added;
    this.element.dataset.blocks = Boolean(shown.raw.blocked);
    this.find(".key .blocked").textContent = shown.run.removal.split(" ")[0];
    this.fillChoices();
    app.changed(this);
  }

  fillChoices() {
    const { run } = this.sample;
    const fill = (selector, options) => {
      const box = this.find(selector);
      box.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
      box.disabled = options.length < 2;
    };
    fill(".choose-run", app.runs.map((one, index) => [index, one.label]));
    fill(".choose-sample", run.samples.map((one, index) => [index, `sample ${one.raw.index}`]));
    fill(".choose-layer", [[ALL_LAYERS, "all layers"], ...run.layers.map((layer, index) => [index, `layer ${layer}`])]);
    fill(".choose-head", [[MEAN, "mean of heads"], ...run.heads.map((head, index) => [index, `head ${head}`])]);
    this.find(".step").max = this.sample.T - 1;
  }

  /** Looks at a cell for a moment; null leaves it. */
  glance(step, key) {
    if (this.hover.step === step && this.hover.key === key) return;
    this.hover = { step, key };
    for (const other of app.others(this)) other.hover = { step: null, key: other.keyOf(this, key) };
    app.paint();
  }

  /** The key that stands where another pane has one: added sinks are counted apart. */
  keyOf(pane, key) {
    if (key === null || key < 0) return key;
    const at = key < pane.sample.added ? key : key - pane.sample.added + this.sample.added;
    return at < this.sample.K && key < pane.sample.added === at < this.sample.added ? at : null;
  }

  pin(key) {
    this.view.key = key;
    for (const other of app.others(this)) other.view.key = other.keyOf(this, key) ?? -1;
    app.changed(this);
  }

  /** The key that is looked at: under the pointer, else the chosen one. */
  get key() {
    return this.hover.key ?? this.chosen;
  }

  /** The key that was pinned, else the main sink. */
  get chosen() {
    return this.view.key >= 0 ? this.view.key : this.sample.mainOf(this.view.step, this.view.layer, this.view.head);
  }

  draw() {
    if (!this.sample) return;
    const { sample, view } = this;
    for (const name of ["run", "sample", "layer", "head"]) this.find(`.choose-${name}`).value = view[name];
    const slider = this.find(".step");
    slider.value = view.step;
    const word = sample.run.family === "autoregressive" ? "token" : "step";
    const said = `${word} ${sample.steps[view.step]} of ${sample.steps[sample.T - 1]}`;
    slider.setAttribute("aria-valuetext", said);
    this.find(".step-name").textContent = said;
    this.find(".step-more").textContent = this.progress();
    for (const part of this.parts) part.draw();
  }

  /** "18 masked, 6 committed, block 2": what the canvas is made of at this step. */
  progress() {
    const { sample, view } = this;
    const ages = Array.from({ length: sample.P }, (_, position) => sample.age(view.step, position));
    const masked = ages.filter((age) => age === "masked").length;
    const committed = ages.filter((age) => age.endsWith("committed")).length;
    const parts = masked ? [`${masked} masked`, `${committed} committed`] : [`${committed} committed`];
    const block = sample.raw.blocks[view.step];
    if (block >= 0 && sample.raw.blocks[sample.T - 1] > 0) parts.push(`block ${block}`);
    return parts.join(" · ");
  }
}
