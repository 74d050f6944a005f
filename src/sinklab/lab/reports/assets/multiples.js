// Small multiples: every head as a thumbnail of step by position with the path of its main sink; a click chooses it.

const THUMB = { rows: 24, columns: 32, gap: 3, left: 26, bottom: 18, tall: 46, most: 760 };

class Multiples {
  constructor(pane) {
    this.pane = pane;
    this.board = new Board(pane.find(".multiples canvas"));
    this.picture = document.createElement("canvas");
    this.hovered = null;
    const { canvas } = this.board;
    canvas.addEventListener("pointermove", (event) => this.hover(this.cellAt(event)));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) app.look(pane, cell.layer, cell.head);
    });
  }

  hover(cell) {
    if (cell?.layer === this.hovered?.layer && cell?.head === this.hovered?.head) return;
    this.hovered = cell;
    app.paint();
  }

  cellAt(event) {
    const { L, H } = this.pane.sample;
    const [x, y] = this.board.at(event);
    const [head, layer] = [Math.floor((x - THUMB.left) / this.wide), Math.floor(y / this.tall)];
    return layer >= 0 && layer < L && head >= 0 && head < H ? { layer, head } : null;
  }

  draw() {
    const { sample, view } = this.pane;
    const { canvas } = this.board;
    const tall = Math.max(6, Math.min(THUMB.tall, THUMB.most / sample.L));
    canvas.style.height = `${Math.round(tall * sample.L + THUMB.bottom)}px`;
    const [width, height] = this.board.begin();
    if (width < 60 || height < 30) return;
    [this.wide, this.tall] = [(width - THUMB.left - 2) / sample.H, (height - THUMB.bottom) / sample.L];
    const key = [view.run, view.sample, colours.dark, width, height].join("/");
    if (key !== this.key) this.paint(width, height);
    this.key = key;
    this.board.context.drawImage(this.picture, 0, 0, width, height);
    this.drawAxes(height);
    if (view.layer !== ALL_LAYERS && view.head !== MEAN) this.outline(view.layer, view.head, "accent", 2);
    if (this.hovered) this.outline(this.hovered.layer, this.hovered.head, "ink", 1);
    this.say();
  }

  /** All thumbnails, drawn once for a sample and a size. */
  paint(width, height) {
    const { sample } = this.pane;
    const ratio = devicePixelRatio || 1;
    [this.picture.width, this.picture.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    const context = this.picture.getContext("2d");
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    context.lineWidth = Math.min(this.wide, this.tall) > 30 ? 1.4 : 0.8;
    const gap = Math.min(this.wide, this.tall) > 14 ? THUMB.gap : 1;
    const [wide, tall] = [this.wide - gap, this.tall - gap];
    for (let layer = 0; layer < sample.L; layer++) {
      for (let head = 0; head < sample.H; head++) {
        const [x, y] = [THUMB.left + head * this.wide, layer * this.tall];
        context.fillStyle = colours.of("cell");
        context.fillRect(x, y, wide, tall);
        context.drawImage(this.thumbnail(layer, head), x, y, wide, tall);
        context.strokeStyle = colours.of("line");
        if (gap > 1) context.strokeRect(x - 0.5, y - 0.5, wide + 1, tall + 1);
        context.strokeStyle = colours.of("accent");
        context.beginPath();
        for (let step = 0; step < sample.T; step++) {
          const key = sample.main(step, layer, head);
          if (key >= 0) context.lineTo(x + ((Math.max(key - sample.added, -0.5) + 0.5) / sample.P) * wide, y + ((step + 0.5) / sample.T) * tall);
        }
        context.stroke();
      }
    }
  }

  /** At most 24 by 32 cells, each the greatest of what falls into it: a sink is never averaged away. */
  thumbnail(layer, head) {
    const { sample } = this.pane;
    const [rows, columns] = [Math.min(sample.T, THUMB.rows), Math.min(sample.P, THUMB.columns)];
    const cells = new Uint8Array(rows * columns);
    const put = (step, key, code) => {
      if (key < sample.added) return;
      const place = Math.floor((step * rows) / sample.T) * columns + Math.floor(((key - sample.added) * columns) / sample.P);
      cells[place] = Math.max(cells[place], code);
    };
    const start = (layer * sample.H + head) * sample.T;
    for (let step = 0; step < sample.T; step++) {
      for (const rank of sample.dense ? [] : sample.ranks) if (rank.keys[start + step]) put(step, rank.keys[start + step] - 1, rank.codes[start + step]);
      for (let key = 0; sample.dense && key < sample.K; key++) put(step, key, sample.arrays.heads[(start + step) * sample.K + key]);
    }
    const table = colours.table(sample);
    const image = (this.image ??= document.createElement("canvas"));
    [image.width, image.height] = [columns, rows];
    const context = image.getContext("2d");
    const pixels = context.createImageData(columns, rows);
    cells.forEach((code, pixel) => {
      pixels.data.set(table[code].rgb, pixel * 4);
      pixels.data[pixel * 4 + 3] = code ? 255 : 0;
    });
    context.putImageData(pixels, 0, 0);
    return image;
  }

  drawAxes(height) {
    const { sample } = this.pane;
    for (const tick of wholeTicks(0, sample.L - 1, Math.min(height / 18, 12))) {
      this.board.text(String(sample.run.layers[tick]), THUMB.left - 6, (tick + 0.5) * this.tall, "right");
    }
    for (const tick of wholeTicks(0, sample.H - 1, Math.min((this.wide * sample.H) / 30, 16))) {
      this.board.text(String(sample.run.heads[tick]), THUMB.left + (tick + 0.5) * this.wide, height - THUMB.bottom + 10, "center");
    }
  }

  outline(layer, head, colour, width) {
    const { context } = this.board;
    context.strokeStyle = colours.of(colour);
    context.lineWidth = width;
    context.strokeRect(THUMB.left + head * this.wide - 1, layer * this.tall, this.wide - 1, this.tall - 1);
  }

  say() {
    const { sample, view } = this.pane;
    const at = this.hovered ?? view;
    const name = at.layer === ALL_LAYERS || at.head === MEAN ? "" : `Layer ${sample.run.layers[at.layer]}, head ${sample.run.heads[at.head]}`;
    const facts = sample.run.head_maps.map(({ name: what, values, unit }) => `${what} ${number(values[at.layer * sample.H + at.head] ?? NaN)}${unit}`);
    this.pane.find(".multiples .note").textContent = name && `${name}: ${facts.join(", ")}.`;
    this.board.canvas.setAttribute("aria-label", `Thumbnails of ${sample.L} layers by ${sample.H} heads, steps down, positions across, main sinks as lines. ${name}`);
  }
}
