// Step by position: one image for the chosen view, with the step and the position that are looked at.

const MARGIN = { left: 34, right: 6, top: 6, bottom: 20 };

class HeatMap {
  constructor(pane) {
    this.pane = pane;
    this.board = new Board(pane.find(".map canvas"));
    this.image = document.createElement("canvas");
    this.key = "";
    const { canvas } = this.board;
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerleave", () => pane.glance(null, null));
    canvas.addEventListener("pointerdown", (event) => this.onPress(event));
    canvas.addEventListener("pointerup", () => (this.dragging = false));
    canvas.addEventListener("pointercancel", () => (this.dragging = false));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
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
    const [x, y] = this.board.at(event);
    const step = Math.floor(((y - this.box.top) / this.box.height) * sample.T);
    const added = Math.floor((x - MARGIN.left) / (this.box.strip || 1));
    const position = Math.floor(((x - this.box.left) / this.box.width) * sample.P);
    const clamp = (value, most) => Math.min(Math.max(value, 0), most);
    const key = x < this.box.left && sample.added ? clamp(added, sample.added - 1) : sample.added + clamp(position, sample.P - 1);
    return { step: clamp(step, sample.T - 1), key };
  }

  onMove(event) {
    if (!this.box) return;
    const { step, key } = this.cellAt(event);
    if (this.dragging) app.goTo(this.pane, step);
    this.pane.glance(step, key);
  }

  onPress(event) {
    if (!this.box) return;
    const { step, key } = this.cellAt(event);
    this.dragging = true;
    this.pane.pin(key);
    app.goTo(this.pane, step);
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
    const [width, height] = this.board.begin();
    if (width < 40 || height < 40) return;
    this.place(width, height);
    this.drawImage();
    const blocked = sample.blocks ? this.blocked() : [];
    hatch(this.board.context, blocked);
    this.drawAxes(height);
    this.drawCross();
    const said = `Received attention, step by position, ${viewName(sample, view)}`;
    this.board.canvas.setAttribute("aria-label", said);
    this.pane.find(".view-name").textContent = viewName(sample, view);
    const note = this.pane.find(".map .note");
    const ranked = `The ${sample.ranks.length} greatest keys of this head at each step; the others are below them.`;
    const heads = sample.headsOf(view.layer, view.head).length;
    const of = heads > 1 ? `at least half of these ${heads} heads` : "this head";
    const marks = blocked.length ? `Hatched: ${sample.run.removal} ${of} at this step.` : `No key was ${sample.run.removal} ${of}.`;
    const notes = [sample.complete(view.layer, view.head) ? "" : ranked, sample.blocks ? marks : ""];
    note.textContent = notes.filter(Boolean).join(" ");
  }

  /** Places of the keys that were blocked: each from the first step on at which it was, to the last in a row. */
  blocked() {
    const { sample, view } = this.pane;
    const places = [];
    let open = new Map();
    for (let step = 0; step <= sample.T; step++) {
      const now = new Map(step < sample.T ? sample.hatched(step, view).map((key) => [key, open.get(key) ?? step]) : []);
      for (const [key, first] of open) {
        if (!now.has(key)) places.push([this.x(key), this.y(first), Math.max(this.wide(key), 3), Math.max(this.y(step) - this.y(first), 3)]);
      }
      open = now;
    }
    return places;
  }

  drawImage() {
    const { sample, view } = this.pane;
    const { context } = this.board;
    const { box, image } = this;
    const ratio = devicePixelRatio || 1;
    const columns = Math.min(sample.P, Math.floor(box.width * ratio));
    const rows = Math.min(sample.T, Math.floor(box.height * ratio));
    const key = [view.run, view.sample, view.layer, view.head, colours.dark, columns, rows].join("/");
    if (key !== this.key) this.paintImage(columns, rows);
    this.key = key;
    context.imageSmoothingEnabled = false;
    context.fillStyle = colours.of("cell");
    context.fillRect(box.left, box.top, box.width, box.height);
    context.drawImage(image, sample.added, 0, columns, rows, box.left, box.top, box.width, box.height);
    if (!sample.added) return;
    context.fillRect(MARGIN.left, box.top, box.strip * sample.added, box.height);
    context.drawImage(image, 0, 0, sample.added, rows, MARGIN.left, box.top, box.strip * sample.added, box.height);
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

  drawAxes(height) {
    const { sample } = this.pane;
    const { board, box } = this;
    const below = height - MARGIN.bottom + 11;
    if (sample.added) board.text("sink", MARGIN.left + (box.strip * sample.added) / 2, below, "center");
    const right = box.left + box.width;
    board.text("position", right, below, "right");
    board.text("step", 2, MARGIN.top + 4);
    const ticks = wholeTicks(0, sample.P - 1, box.width / 70);
    for (const tick of ticks) {
      const x = this.x(tick + sample.added) + this.wide(tick + sample.added) / 2;
      if (x < right - 56 && (!sample.added || x > box.left + 14)) board.text(String(tick), x, below, "center");
    }
    for (const tick of wholeTicks(0, sample.T - 1, box.height / 45).filter((at) => this.y(at + 0.5) > MARGIN.top + 14)) {
      board.text(String(sample.steps[tick]), MARGIN.left - 6, this.y(tick + 0.5), "right");
    }
    this.drawBlocks();
  }

  /** A short line at the left where the decoder goes on to its next block. */
  drawBlocks() {
    const { blocks } = this.pane.sample.raw;
    for (let step = 1; step < blocks.length; step++) {
      if (blocks[step] === blocks[step - 1]) continue;
      this.board.line(MARGIN.left - 4, this.y(step), MARGIN.left, this.y(step), colours.of("muted"));
    }
  }

  drawCross() {
    const { sample, view, hover } = this.pane;
    const { context } = this.board;
    const { box } = this;
    const tall = Math.max(box.height / sample.T, 1);
    const right = box.left + box.width;
    context.strokeStyle = colours.of("accent");
    context.lineWidth = 1.5;
    context.strokeRect(MARGIN.left - 0.5, this.y(view.step) - 0.5, right - MARGIN.left + 1, tall + 1);
    const key = this.pane.key;
    if (key >= 0) {
      context.globalAlpha = 0.8;
      context.strokeStyle = colours.of("ink");
      context.lineWidth = 1;
      context.setLineDash([3, 3]);
      context.strokeRect(this.x(key) - 0.5, box.top - 0.5, Math.max(this.wide(key), 1) + 1, box.height + 1);
      context.setLineDash([]);
      context.globalAlpha = 1;
    }
    if (hover.step !== null && hover.step !== view.step) {
      this.board.line(MARGIN.left, this.y(hover.step + 0.5), right, this.y(hover.step + 0.5), colours.of("ink"), 0.5);
    }
  }
}
