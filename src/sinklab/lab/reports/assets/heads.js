// Layer by head: one number per head over the whole run; a click chooses the head.

class HeadMap extends Board {
  constructor(pane) {
    super(pane, ".heads canvas");
    this.hovered = null;
    this.listen({
      pointermove: (event) => this.hover(this.box && this.cellAt(event)),
      pointerleave: () => this.hover(null),
      click: (event) => this.onClick(event),
    });
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

  buildChoices() {
    const { run } = this.pane.sample;
    if (this.shownRun === run) return;
    this.shownRun = run;
    this.buttons = this.metrics.map((metric, index) => {
      const button = make("button", { type: "button", title: metric.about }, metric.name);
      button.addEventListener("click", () => {
        app.metric = index;
        app.paint();
      });
      return button;
    });
    this.pane.find(".metrics").replaceChildren(...this.buttons);
  }

  place(width, height) {
    const { L, H } = this.pane.sample;
    const left = 26;
    const bottom = 18;
    const wide = Math.max(Math.min((width - left - 2) / H, 44), 2);
    // A model of few layers fills its panel, with cells at most twice as tall as wide.
    const tall = Math.max(Math.min((height - bottom - 5) / L, 2 * wide), 2);
    this.box = { left, top: 5, wide, tall, width: wide * H, height: tall * L };
  }

  cellAt(event) {
    const { L, H } = this.pane.sample;
    const [x, y] = this.at(event);
    const head = Math.floor((x - this.box.left) / this.box.wide);
    const layer = Math.floor((y - this.box.top) / this.box.tall);
    if (layer < 0 || layer >= L || head >= H) return null;
    // Left of the map stand the layers' numbers: they choose the mean over the heads.
    return { layer, head: head < 0 ? MEAN : head };
  }

  hover(cell) {
    this.canvas.style.cursor = cell ? "pointer" : "default";
    if (JSON.stringify(cell) === JSON.stringify(this.hovered)) return;
    this.hovered = cell;
    app.paint();
  }

  onClick(event) {
    const cell = this.cellAt(event);
    if (!cell) return;
    const { view } = this.pane;
    // A second click on the chosen head goes back to the mean of its layer.
    const again = view.layer === cell.layer && view.head === cell.head;
    app.look(this.pane, cell.layer, again ? MEAN : cell.head);
  }

  /** 0 to 1 on the metric's own scale. */
  part(value) {
    const { low, high } = this.span;
    if (value == null) return NaN;
    const at = this.metric.log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return Math.min(Math.max(at, 0), 1);
  }

  colour(value) {
    const part = this.part(value);
    if (Number.isNaN(part)) return colours.of("cell");
    return `rgb(${colours.rgb(colours.low * (colours.high / colours.low) ** part)})`;
  }

  draw() {
    const { sample, view } = this.pane;
    this.buildChoices();
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(this.metrics[i] === this.metric)));
    const [width, height] = this.begin();
    if (width < 40 || height < 30) return;
    this.place(width, height);
    const { context } = this;
    const { left, top, wide, tall } = this.box;
    const gap = Math.min(wide, tall) > 5 ? 1 : 0;
    for (let layer = 0; layer < sample.L; layer++) {
      for (let head = 0; head < sample.H; head++) {
        context.fillStyle = this.colour(this.metric.values[layer * sample.H + head]);
        context.fillRect(left + head * wide, top + layer * tall, wide - gap, tall - gap);
      }
    }
    this.drawAxes();
    this.outline(view.layer, view.head, colours.of("accent"), tall > 8 || view.head !== MEAN ? 2 : 1);
    if (this.hovered) this.outline(this.hovered.layer, this.hovered.head, colours.of("ink"), 1);
    this.say();
  }

  drawAxes() {
    const { sample } = this.pane;
    const { left, top, wide, tall, height } = this.box;
    for (const tick of wholeTicks(0, sample.L - 1, Math.min(height / 18, 12))) {
      this.text(String(sample.run.layers[tick]), left - 6, top + (tick + 0.5) * tall, "right");
    }
    this.text("head", left + wide * sample.H + 4, top + height + 10);
    for (const tick of wholeTicks(0, sample.H - 1, Math.min((wide * sample.H) / 22, 12))) {
      this.text(String(sample.run.heads[tick]), left + (tick + 0.5) * wide, top + height + 10, "center");
    }
  }

  outline(layer, head, colour, width) {
    if (layer === ALL_LAYERS) return;
    const { left, top, wide, tall } = this.box;
    const across = head === MEAN ? this.box.width : wide;
    this.frame(left + Math.max(head, 0) * wide - 0.5, top + layer * tall - 0.5, across, tall, colour, width);
  }

  say() {
    const { sample, view } = this.pane;
    const at = this.hovered || view;
    const { metric } = this;
    const { low, high } = this.span;
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
    this.canvas.setAttribute("aria-label", `${metric.about}, by layer and head. ${text}`);
  }
}
