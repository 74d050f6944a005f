// Layer by head: one number per head over the whole run, a cell each; a click chooses the head.

class HeadMap {
  constructor(pane) {
    this.pane = pane;
    this.grid = pane.find(".grid");
    this.grid.addEventListener("pointerover", (event) => this.hover(this.cellOf(event)));
    this.grid.addEventListener("pointerleave", () => this.hover(null));
    this.grid.addEventListener("click", (event) => this.onClick(this.cellOf(event)));
  }

  get metrics() {
    return this.pane.sample.run.head_maps;
  }

  get metric() {
    return this.metrics[Math.min(app.metric, this.metrics.length - 1)];
  }

  /** One scale for all runs of the page, so that colours can be compared. */
  get span() {
    const same = app.runs.map((run) => run.head_maps.find((map) => map.name === this.metric.name)).filter(Boolean);
    return { low: Math.min(...same.map((map) => map.low)), high: Math.max(...same.map((map) => map.high)) };
  }

  /** Buttons of the metrics, and a row of cells for each layer; the name of a layer stands for the mean over its heads. */
  build({ run, L, H }) {
    this.run = run;
    this.buttons = this.metrics.map((metric, index) => {
      const button = make("button", { type: "button", title: metric.about }, metric.name);
      button.addEventListener("click", () => {
        app.metric = index;
        app.paint();
      });
      return button;
    });
    this.pane.find(".metrics").replaceChildren(...this.buttons);
    const named = (names) => names.map((name, place) => (wholeTicks(0, names.length - 1, 10).includes(place) ? String(name) : ""));
    const cells = (layer) => run.heads.map((_, head) => make("i", { "data-layer": layer, "data-head": head }));
    const rows = named(run.layers).map((name, layer) => make("div", {}, make("small", { "data-layer": layer, "data-head": MEAN }, name), ...cells(layer)));
    const below = named(run.heads).map((name) => make("small", {}, name));
    this.grid.replaceChildren(...rows, make("div", {}, make("small", {}, "head"), ...below));
    this.grid.style.setProperty("--layers", L);
    this.grid.style.setProperty("--heads", H);
  }

  cellOf(event) {
    const { layer, head } = event.target.dataset;
    return layer === undefined ? null : { layer: Number(layer), head: Number(head) };
  }

  hover(cell) {
    this.hovered = cell;
    app.paint();
  }

  onClick(cell) {
    if (!cell) return;
    const { view } = this.pane;
    // A second click on the chosen head goes back to the mean of its layer.
    const again = view.layer === cell.layer && view.head === cell.head;
    app.look(this.pane, cell.layer, again ? MEAN : cell.head);
  }

  colour(value, { low, high }) {
    if (value === null) return "";
    const part = this.metric.log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return `rgb(${colours.rgb(colours.low * (colours.high / colours.low) ** clamp(part, 1))})`;
  }

  draw() {
    const { sample, view } = this.pane;
    if (this.run !== sample.run) this.build(sample);
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(this.metrics[i] === this.metric)));
    const { metric, span } = this;
    const cells = this.grid.querySelectorAll("i");
    const shown = [metric.name, metric.values, span.low, span.high, colours.dark].join();
    if (shown !== this.shown) cells.forEach((cell, i) => (cell.style.backgroundColor = this.colour(metric.values[i], span)));
    this.shown = shown;
    this.grid.querySelector(".chosen")?.classList.remove("chosen");
    if (view.layer !== ALL_LAYERS) (view.head === MEAN ? this.grid.children[view.layer] : cells[view.layer * sample.H + view.head]).classList.add("chosen");
    this.say(span);
  }

  say({ low, high }) {
    const { sample, view } = this.pane;
    const at = this.hovered || view;
    const { metric } = this;
    let text = "";
    if (at.layer !== ALL_LAYERS) {
      const row = metric.values.slice(at.layer * sample.H, (at.layer + 1) * sample.H).filter((value) => value !== null);
      const mean = row.reduce((sum, value) => sum + value, 0) / row.length;
      const value = at.head === MEAN ? mean : metric.values[at.layer * sample.H + at.head];
      const name = `Layer ${sample.run.layers[at.layer]}`;
      text = `${name}${at.head === MEAN ? "" : `, head ${sample.run.heads[at.head]}`}: ${number(value)}${metric.unit}. `;
    }
    text += `Colours from ${number(low)} to ${number(high)}${metric.unit}${metric.log ? ", logarithmic" : ""}.`;
    this.pane.find(".heads .note").textContent = `${metric.about}. ${text}`;
    this.grid.setAttribute("aria-label", `${metric.about}, by layer and head. ${text}`);
  }
}
