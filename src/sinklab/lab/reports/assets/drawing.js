// A picture on a canvas that is sharp on every screen, and the ticks of an axis.

class Board {
  constructor(pane, selector) {
    this.pane = pane;
    this.canvas = pane.find(selector);
    this.context = this.canvas.getContext("2d");
    new ResizeObserver(() => app.paint()).observe(this.canvas);
  }

  /** What is done on events of the canvas, by their names. */
  listen(does) {
    for (const name of Object.keys(does)) this.canvas.addEventListener(name, does[name]);
  }

  /** Clears and fits the canvas to its place; returns the width and height in CSS pixels. */
  begin() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const ratio = devicePixelRatio || 1;
    const size = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== size[0] || this.canvas.height !== size[1]) [this.canvas.width, this.canvas.height] = size;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, height);
    this.context.font = `11px ${getComputedStyle(this.canvas).fontFamily}`;
    return [width, height];
  }

  text(text, x, y, align = "left") {
    this.context.fillStyle = colours.of("muted");
    this.context.textAlign = align;
    this.context.textBaseline = "middle";
    this.context.fillText(text, x, y);
  }

  /** A line, or the outline of a box; a path of its own, so that nothing else is drawn again. */
  stroke(path, colour, width = 1) {
    this.context.strokeStyle = colour;
    this.context.lineWidth = width;
    this.context.stroke(path);
  }

  line(x0, y0, x1, y1, colour, width = 1) {
    this.stroke(polygon([[x0, y0], [x1, y1]]), colour, width);
  }

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

  /** Where the pointer is, in CSS pixels of the canvas. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
}

function polygon(corners) {
  const path = new Path2D();
  for (const corner of corners) path.lineTo(...corner);
  path.closePath();
  return path;
}

/** Whole round numbers from low to high, about `count` of them. */
function wholeTicks(low, high, count) {
  const rough = Math.max((high - low) / Math.max(count, 1), 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough - 1e-9);
  const ticks = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(at);
  return ticks;
}
