// A canvas that is sharp on every screen, and the ticks of an axis.

class Board {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    new ResizeObserver(() => app.paint()).observe(canvas);
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
    this.context.lineWidth = 1;
    this.context.globalAlpha = 1;
    return [width, height];
  }

  text(text, x, y, align = "left", baseline = "middle", colour = colours.of("muted")) {
    this.context.fillStyle = colour;
    this.context.textAlign = align;
    this.context.textBaseline = baseline;
    this.context.fillText(text, x, y);
  }

  line(x0, y0, x1, y1, colour, width = 1) {
    this.context.strokeStyle = colour;
    this.context.lineWidth = width;
    this.context.beginPath();
    this.context.moveTo(x0, y0);
    this.context.lineTo(x1, y1);
    this.context.stroke();
  }

  /** Where the pointer is, in CSS pixels of the canvas. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
}

/** Round numbers from low to high, about `count` of them. */
function niceTicks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough - 1e-9);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) ticks.push(at);
  return ticks.map((tick) => Number(tick.toPrecision(10)));
}

const wholeTicks = (low, high, count) => niceTicks(low, high, count).filter(Number.isInteger);

/** Diagonal lines over places [x, y, width, height] of a board: what is blocked, said without a colour. */
function hatch(context, places) {
  const { clientWidth: width, clientHeight: height } = context.canvas;
  const shape = new Path2D();
  for (const place of places) shape.rect(...place);
  context.save();
  context.clip(shape);
  context.strokeStyle = colours.of("ink");
  context.lineWidth = 1;
  context.stroke(shape);
  context.beginPath();
  for (let at = -height; at < width; at += 5) {
    context.moveTo(at, height);
    context.lineTo(at + height, 0);
  }
  context.stroke();
  context.restore();
}
