// Step by position: one image for the chosen view, the main sinks of its heads as outlines, and what is looked at.

const MARGIN = { left: 34, right: 6, top: 6, bottom: 20 };
// Corners of an outline by what a position holds: colours alone do not tell everybody. Others are circles.
const CORNERS = {
  prompt: [[-0.85, -0.85], [0.85, -0.85], [0.85, 0.85], [-0.85, 0.85]],
  masked: [[0, -1.1], [1, 0.8], [-1, 0.8]],
  "just committed": [[0, -1.3], [1.1, 0], [0, 1.3], [-1.1, 0]],
};

class HeatMap {
  constructor(pane) {
    this.pane = pane;
    this.canvas = pane.find(".map canvas");
    this.context = this.canvas.getContext("2d");
    this.image = document.createElement("canvas");
    new ResizeObserver(() => app.paint()).observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerleave", () => pane.glance(null, null));
    this.canvas.addEventListener("pointerdown", (event) => this.onPress(event));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Clears and fits the canvas to its place; returns the width and height in CSS pixels. */
  begin() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const ratio = devicePixelRatio || 1;
    [this.canvas.width, this.canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    this.context.scale(ratio, ratio);
    this.context.font = `11px ${getComputedStyle(this.canvas).fontFamily}`;
    return [width, height];
  }

  text(text, x, y, align = "left") {
    this.context.fillStyle = colours.of("muted");
    this.context.textAlign = align;
    this.context.textBaseline = "middle";
    this.context.fillText(text, x, y);
  }

  stroke(path, colour, width = 1) {
    this.context.strokeStyle = colour;
    this.context.lineWidth = width;
    this.context.stroke(path);
  }

  /** The outline of a box; without a height a line. */
  frame(x, y, width, height, colour, thick = 1) {
    this.stroke(polygon([[x, y], [x + width, y], [x + width, y + height], [x, y + height]]), colour, thick);
  }

  /** Diagonal lines over places [x, y, width, height]: what is blocked, said without a colour. */
  hatch(places) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const shape = new Path2D();
    for (const place of places) shape.rect(...place);
    this.context.save();
    this.context.clip(shape);
    for (let at = -height; at < width; at += 5) shape.addPath(polygon([[at, height], [at + height, 0]]));
    this.stroke(shape, colours.of("ink"));
    this.context.restore();
  }

  /** Added sinks stand left of the text, wide enough to be seen. */
  place(width, height) {
    const { sample } = this.pane;
    const inner = width - MARGIN.left - MARGIN.right;
    const strip = sample.added ? Math.max(12, inner / sample.K) : 0;
    const gap = sample.added ? 5 : 0;
    this.box = {
      top: MARGIN.top,
      height: height - MARGIN.top - MARGIN.bottom,
      left: MARGIN.left + strip * sample.added + gap,
      strip,
      width: inner - strip * sample.added - gap,
    };
  }

  x(key) {
    const { sample } = this.pane;
    if (key < sample.added) return MARGIN.left + this.box.strip * key;
    return this.box.left + ((key - sample.added) / sample.P) * this.box.width;
  }

  wide(key) {
    return key < this.pane.sample.added ? this.box.strip : this.box.width / this.pane.sample.P;
  }

  y(step) {
    return this.box.top + (step / this.pane.sample.T) * this.box.height;
  }

  cellAt(event) {
    const { sample } = this.pane;
    const at = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - at.left, event.clientY - at.top];
    const step = Math.floor(((y - this.box.top) / this.box.height) * sample.T);
    const added = Math.floor((x - MARGIN.left) / (this.box.strip || 1));
    const position = Math.floor(((x - this.box.left) / this.box.width) * sample.P);
    const key = x < this.box.left && sample.added ? clamp(added, sample.added - 1) : sample.added + clamp(position, sample.P - 1);
    return { step: clamp(step, sample.T - 1), key };
  }

  onMove(event) {
    if (!this.box) return;
    const { step, key } = this.cellAt(event);
    if (event.buttons) app.goTo(this.pane, step);
    this.pane.glance(step, key);
  }

  onPress(event) {
    if (!this.box) return;
    this.pane.pin(this.cellAt(event).key);
    this.onMove(event);
  }

  /** Steps run downwards here, so up and down are steps where the map has the focus. */
  onKey(event) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    app.goTo(this.pane, this.pane.view.step + by);
  }

  draw() {
    const { sample, view } = this.pane;
    const [width, height] = this.begin();
    if (width < 40 || height < 40) return;
    this.place(width, height);
    this.drawImage();
    const blocked = this.blocked();
    this.hatch(blocked);
    this.drawMains();
    this.drawAxes(height);
    this.drawCross();
    const said = `Received attention and main sinks, step by position, ${viewName(sample, view)}`;
    this.canvas.setAttribute("aria-label", said);
    this.pane.find(".view-name").textContent = viewName(sample, view);
    const least = sample.floor(view.layer, view.head);
    const above = least > 2 ** sample.raw.scale.low ? `The page has what is above ${times(least)} in this head.` : "";
    const heads = sample.headsOf(view.layer, view.head).length;
    const of = heads > 1 ? `at least half of these ${heads} heads` : "this head";
    const marks = blocked.length ? `Hatched: ${sample.run.removal} ${of} at this step.` : `No key was ${sample.run.removal} ${of}.`;
    const notes = [above, sample.raw.blocked ? marks : ""];
    this.pane.find(".map .note").textContent = notes.filter(Boolean).join(" ");
  }

  /** Places of the keys that were blocked, wide and tall enough to be seen. */
  blocked() {
    const { sample, view } = this.pane;
    const tall = Math.max(this.box.height / sample.T, 3);
    return sample.steps.flatMap((_, step) => sample.hatched(step, view).map((key) => [this.x(key), this.y(step), Math.max(this.wide(key), 3), tall]));
  }

  drawImage() {
    const { sample, view } = this.pane;
    const { context, box, image } = this;
    const ratio = devicePixelRatio || 1;
    const columns = Math.min(sample.P, Math.floor(box.width * ratio));
    const rows = Math.min(sample.T, Math.floor(box.height * ratio));
    // On the live page a sample grows, step by step.
    const key = [view.layer, view.head, colours.dark, columns, rows, sample.told?.length].join("/");
    if (key !== this.key || sample !== this.painted) this.paintImage(columns, rows);
    Object.assign(this, { key, painted: sample });
    context.imageSmoothingEnabled = false;
    context.fillStyle = colours.of("cell");
    const parts = [[0, sample.added, MARGIN.left, box.strip * sample.added], [sample.added, columns, box.left, box.width]];
    for (const [from, count, left, width] of parts) {
      context.fillRect(left, box.top, width, box.height);
      context.drawImage(image, from, 0, count, rows, left, box.top, width, box.height);
    }
  }

  /** One pixel per cell; where there are more cells than pixels, the greatest of them: a sink is never averaged away. */
  paintImage(columns, rows) {
    const { sample, view } = this.pane;
    const codes = sample.plane(view.layer, view.head);
    const table = colours.table(sample);
    const width = sample.added + columns;
    const pooled = new Uint8Array(width * rows);
    for (let step = 0; step < sample.T; step++) {
      const start = Math.floor((step * rows) / sample.T) * width;
      for (let key = 0; key < sample.K; key++) {
        const place = key < sample.added ? key : sample.added + Math.floor(((key - sample.added) * columns) / sample.P);
        pooled[start + place] = Math.max(pooled[start + place], codes[step * sample.K + key]);
      }
    }
    [this.image.width, this.image.height] = [width, rows];
    const context = this.image.getContext("2d");
    const pixels = context.createImageData(width, rows);
    pooled.forEach((code, pixel) => {
      pixels.data.set(table[code].rgb, pixel * 4);
      pixels.data[pixel * 4 + 3] = code ? 255 : 0;
    });
    context.putImageData(pixels, 0, 0);
  }

  /** The main sinks at each step: the area of an outline is the share of the view's heads. */
  drawMains() {
    const { sample, view } = this.pane;
    const heads = sample.headsOf(view.layer, view.head).length;
    for (let step = 0; step < sample.T; step++) {
      for (const [key, count] of sample.counts("main", step, view.layer, view.head)) {
        const age = sample.age(step, key - sample.added);
        const size = Math.max(1.5, 5 * Math.sqrt(count / heads));
        const [x, y] = [this.x(key) + this.wide(key) / 2, this.y(step + 0.5)];
        const path = polygon((CORNERS[age] ?? []).map(([dx, dy]) => [x + dx * size, y + dy * size]));
        if (!CORNERS[age]) path.arc(x, y, size, 0, 7);
        this.stroke(path, colours.of("surface"), 3);
        // "just committed" has the colour "just", the others that of their name.
        this.stroke(path, colours.of(age.split(" ")[0]), 1.5);
      }
    }
  }

  drawAxes(height) {
    const { sample } = this.pane;
    const { box } = this;
    const below = height - MARGIN.bottom + 11;
    if (sample.added) this.text("sink", MARGIN.left + (box.strip * sample.added) / 2, below, "center");
    const right = box.left + box.width;
    this.text("position", right, below, "right");
    this.text("step", 2, MARGIN.top + 4);
    for (const tick of wholeTicks(0, sample.P - 1, box.width / 70)) {
      const x = this.x(tick + sample.added) + this.wide(tick + sample.added) / 2;
      if (x < right - 56 && (!sample.added || x > box.left + 14)) this.text(String(tick), x, below, "center");
    }
    for (const tick of wholeTicks(0, sample.T - 1, box.height / 45).filter((at) => this.y(at + 0.5) > MARGIN.top + 14)) {
      this.text(String(sample.steps[tick]), MARGIN.left - 6, this.y(tick + 0.5), "right");
    }
    // A short line at the left where the decoder goes on to its next block.
    const { blocks } = sample.raw;
    for (let step = 1; step < blocks.length; step++) {
      if (blocks[step] !== blocks[step - 1]) this.frame(MARGIN.left - 4, this.y(step), 4, 0, colours.of("muted"));
    }
  }

  drawCross() {
    const { sample, view, hover, key } = this.pane;
    const { context, box } = this;
    const tall = Math.max(box.height / sample.T, 1);
    const right = box.left + box.width;
    this.frame(MARGIN.left - 0.5, this.y(view.step) - 0.5, right - MARGIN.left + 1, tall + 1, colours.of("accent"), 1.5);
    if (key >= 0) {
      context.setLineDash([3, 3]);
      this.frame(this.x(key) - 0.5, box.top - 0.5, Math.max(this.wide(key), 1) + 1, box.height + 1, colours.of("ink"));
      context.setLineDash([]);
    }
    if (hover.step !== null && hover.step !== view.step) {
      this.frame(MARGIN.left, this.y(hover.step + 0.5), right - MARGIN.left, 0, colours.of("ink"), 0.5);
    }
  }
}

function polygon(corners) {
  const path = new Path2D();
  for (const corner of corners) path.lineTo(...corner);
  path.closePath();
  return path;
}
