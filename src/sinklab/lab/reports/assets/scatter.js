// Received attention against the length of the value vector: one dot per position of this step, all steps faintly.

class Scatter {
  constructor(pane) {
    this.pane = pane;
    this.panel = pane.find(".scatter");
    this.board = new Board(pane.find(".scatter canvas"));
    this.cloud = document.createElement("canvas");
    const { canvas } = this.board;
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerleave", () => pane.glance(null, null));
    canvas.addEventListener("click", (event) => {
      const key = this.nearest(event);
      if (key !== null) pane.pin(key);
    });
  }

  place(width, height) {
    const { sample } = this.pane;
    this.box = { left: 38, top: 20, width: width - 50, height: height - 54 };
    this.low = Math.log2(1 / 16);
    this.high = Math.max(sample.raw.scale.high, 1);
    this.top = this.greatest() * 1.08 || 1;
  }

  /** The greatest norm of the layer: layers differ too much to share an axis. */
  greatest() {
    const { sample } = this.pane;
    const key = `${this.pane.view.run}/${this.pane.view.sample}/${this.layer}`;
    if (key !== this.greatestKey) {
      const cells = sample.T * sample.K;
      const codes = sample.arrays.norms.subarray(this.layer * cells, (this.layer + 1) * cells);
      this.greatestKey = key;
      this.most = sample.norm[codes.reduce((most, code) => Math.max(most, code), 0)];
    }
    return this.most;
  }

  x(score) {
    const part = (Math.log2(Math.max(score, 2 ** this.low)) - this.low) / (this.high - this.low);
    return this.box.left + Math.min(part, 1) * this.box.width;
  }

  y(norm) {
    return this.box.top + this.box.height * (1 - norm / this.top);
  }

  get layer() {
    // A mean of lengths over layers says little: without a chosen layer the first is shown.
    return Math.max(this.pane.view.layer, 0);
  }

  /** Score and norm of a key at a step, null where one of them is not there. */
  point(step, key) {
    const { sample, view } = this.pane;
    const layer = this.layer;
    const code = sample.plane(layer, view.layer === ALL_LAYERS ? MEAN : view.head)[step * sample.K + key];
    const norm = sample.norm[sample.normCode(step, layer, key)];
    const partial = code === 1 && !sample.complete(layer, view.head);
    if (!code || Number.isNaN(norm) || partial) return null;
    return [this.x(sample.score[code]), this.y(norm)];
  }

  nearest(event) {
    if (!this.box) return null;
    const { sample, view } = this.pane;
    const [x, y] = this.board.at(event);
    let best = null;
    let least = 15 ** 2;
    for (let key = 0; key < sample.K; key++) {
      const point = this.point(view.step, key);
      const far = point ? (point[0] - x) ** 2 + (point[1] - y) ** 2 : Infinity;
      if (far < least) [best, least] = [key, far];
    }
    return best;
  }

  onMove(event) {
    const key = this.nearest(event);
    this.pane.glance(null, key);
  }

  draw() {
    const { sample, view } = this.pane;
    this.panel.hidden = !sample.norm;
    if (!sample.norm) return;
    const [width, height] = this.board.begin();
    if (width < 60 || height < 60) return;
    this.place(width, height);
    this.drawAxes(height);
    this.drawCloud(width, height);
    const { context } = this.board;
    for (let key = 0; key < sample.K; key++) this.dot(view.step, key, 2.6);
    const key = this.pane.key;
    const point = key >= 0 && this.point(view.step, key);
    if (point) {
      context.strokeStyle = colours.of("ink");
      context.lineWidth = 1.5;
      context.beginPath();
      context.arc(point[0], point[1], 6, 0, 7);
      context.stroke();
    }
    this.pane.find(".scatter .where").textContent = `layer ${sample.run.layers[this.layer]}`;
  }

  dot(step, key, size) {
    const { sample } = this.pane;
    const point = this.point(step, key);
    if (!point) return;
    const { context } = this.board;
    const added = key < sample.added;
    context.fillStyle = added ? colours.of("added") : colours.age(sample.age(step, key - sample.added));
    shape(context, added ? "" : sample.age(step, key - sample.added), point[0], point[1], added ? size + 1.5 : size);
  }

  drawAxes(height) {
    const { board, box } = this;
    for (const tick of niceTicks(0, this.top, box.height / 30)) {
      board.line(box.left, this.y(tick), box.left + box.width, this.y(tick), colours.of("faint"));
      board.text(number(tick, 2), box.left - 6, this.y(tick), "right");
    }
    const every = Math.max(1, Math.ceil((this.high - this.low) / (box.width / 44)));
    for (let power = 0; power <= this.high; power += every) this.tick(power);
    for (let power = -every; power >= this.low; power -= every) this.tick(power);
    board.text("value norm", 2, 8);
    board.text("received", box.left + box.width / 2, height - 7, "center");
  }

  tick(power) {
    const x = this.x(2 ** power);
    this.board.text(power < 0 ? `1/${2 ** -power}` : `${2 ** power}×`, x, this.box.top + this.box.height + 12, "center");
  }

  /** All steps, drawn once per view: thousands of dots would make playing slow. */
  drawCloud(width, height) {
    const { sample, view } = this.pane;
    const key = [view.run, view.sample, this.layer, view.head, view.layer, width, height, colours.dark].join("/");
    if (key !== this.cloudKey) {
      this.cloudKey = key;
      [this.cloud.width, this.cloud.height] = [width, height];
      const context = this.cloud.getContext("2d");
      context.fillStyle = colours.of("muted");
      context.globalAlpha = 0.16;
      const skip = Math.ceil((sample.T * sample.K) / 20000);
      for (let cell = 0; cell < sample.T * sample.K; cell += skip) {
        const point = this.point(Math.floor(cell / sample.K), cell % sample.K);
        if (point) context.fillRect(point[0] - 1, point[1] - 1, 2, 2);
      }
    }
    this.board.context.drawImage(this.cloud, 0, 0, width, height);
  }
}
