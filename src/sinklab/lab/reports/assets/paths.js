// Where the main sink is at each step: a dot per position, its area the share of heads; the chosen head as a line.

/** A dot by what a position holds: colours alone do not tell everybody. */
function shape(context, age, x, y, size) {
  context.beginPath();
  if (age === "prompt") context.rect(x - size * 0.85, y - size * 0.85, size * 1.7, size * 1.7);
  else if (age === "masked") for (const [dx, dy] of [[0, -1.1], [1, 0.8], [-1, 0.8]]) context.lineTo(x + dx * size, y + dy * size);
  else if (age === "just committed") for (const [dx, dy] of [[0, -1.3], [1.1, 0], [0, 1.3], [-1.1, 0]]) context.lineTo(x + dx * size, y + dy * size);
  else context.arc(x, y, size, 0, 7);
  context.fill();
}

class Paths {
  constructor(pane) {
    this.pane = pane;
    this.board = new Board(pane.find(".paths canvas"));
    const { canvas } = this.board;
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerleave", () => pane.glance(null, null));
    canvas.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (!cell) return;
      pane.pin(cell.key);
      app.goTo(pane, cell.step);
    });
  }

  place(width, height) {
    const { sample } = this.pane;
    const strip = sample.added ? 8 + 14 * sample.added : 0;
    this.box = { left: 34, top: 20, width: width - 46, height: height - 44 - strip, strip };
  }

  x(step) {
    return this.box.left + ((step + 0.5) / this.pane.sample.T) * this.box.width;
  }

  y(key) {
    const { sample } = this.pane;
    const { top, height } = this.box;
    if (key < sample.added) return top + height + 13 + 14 * key;
    return top + height - ((key - sample.added + 0.5) / sample.P) * height;
  }

  cellAt(event) {
    if (!this.box) return null;
    const { sample } = this.pane;
    const [x, y] = this.board.at(event);
    const { left, top, width, height } = this.box;
    const step = Math.floor(((x - left) / width) * sample.T);
    if (step < 0 || step >= sample.T) return null;
    const position = Math.floor(((top + height - y) / height) * sample.P);
    if (position < 0 && sample.added) return { step, key: Math.min(Math.max(Math.round((y - top - height - 13) / 14), 0), sample.added - 1) };
    // The nearest dot of the step, so that small dots can be hit.
    const near = [...this.dots(step).keys()].sort((a, b) => Math.abs(this.y(a) - y) - Math.abs(this.y(b) - y))[0];
    const close = near !== undefined && Math.abs(this.y(near) - y) < 9;
    return { step, key: close ? near : sample.added + Math.min(Math.max(position, 0), sample.P - 1) };
  }

  onMove(event) {
    const cell = this.cellAt(event);
    if (cell) this.pane.glance(cell.step, cell.key);
  }

  dots(step) {
    return this.pane.sample.mainCounts(step, this.pane.view.layer);
  }

  draw() {
    const { sample, view, hover } = this.pane;
    const [width, height] = this.board.begin();
    if (width < 60 || height < 60) return;
    this.place(width, height);
    const { left, top, width: wide, height: tall } = this.box;
    this.drawAxes();
    this.board.line(this.x(view.step), top, this.x(view.step), top + tall + this.box.strip, colours.of("accent"), 1.5);
    const key = this.pane.key;
    if (key >= 0) this.board.line(left, this.y(key), left + wide, this.y(key), colours.of("line"));
    if (hover.step !== null) this.board.line(this.x(hover.step), top, this.x(hover.step), top + tall, colours.of("line"));
    this.drawDots();
    if (view.layer !== ALL_LAYERS && view.head !== MEAN) this.drawHead();
    this.board.canvas.setAttribute("aria-label", `Position of the main sink over steps, ${viewName(sample, view)}`);
  }

  drawAxes() {
    const { sample } = this.pane;
    const { board, box } = this;
    for (const tick of wholeTicks(0, sample.P - 1, box.height / 40)) {
      const y = this.y(tick + sample.added);
      board.line(box.left, y, box.left + box.width, y, colours.of("faint"));
      board.text(String(tick), box.left - 6, y, "right");
    }
    if (sample.added) board.text("sink", box.left - 6, this.y(0), "right");
    board.text("position", 2, 8);
    board.text("step", box.left + box.width, box.top + box.height + box.strip + 14, "right");
    for (const tick of wholeTicks(0, sample.T - 1, box.width / 60).filter((at) => this.x(at) < box.left + box.width - 34)) {
      board.text(String(sample.steps[tick]), this.x(tick), box.top + box.height + box.strip + 14, "center");
    }
  }

  drawDots() {
    const { sample, view } = this.pane;
    const heads = sample.H * (view.layer === ALL_LAYERS ? sample.L : 1);
    const chosen = view.layer !== ALL_LAYERS && view.head !== MEAN;
    const { context } = this.board;
    context.globalAlpha = chosen ? 0.35 : 0.9;
    for (let step = 0; step < sample.T; step++) {
      for (const [key, count] of this.dots(step)) {
        context.fillStyle = key < sample.added ? colours.of("added") : colours.age(sample.age(step, key - sample.added));
        const age = key < sample.added ? "" : sample.age(step, key - sample.added);
        shape(context, age, this.x(step), this.y(key), Math.max(1.1, 6.5 * Math.sqrt(count / heads)));
      }
    }
    context.globalAlpha = 1;
  }

  drawHead() {
    const { sample, view } = this.pane;
    const { context } = this.board;
    context.strokeStyle = colours.of("ink");
    context.lineWidth = 1.5;
    context.beginPath();
    for (let step = 0; step < sample.T; step++) {
      const key = sample.main(step, view.layer, view.head);
      if (key >= 0) context.lineTo(this.x(step), this.y(key));
    }
    context.stroke();
  }
}
