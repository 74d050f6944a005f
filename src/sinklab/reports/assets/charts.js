// Small line charts as SVG. A chart is {x, y, series, marks, steps}; an axis is {label, log, low, high, format, ticks}.

const CHART = { height: 210, left: 54, right: 12, top: 8, bottom: 36 };

function axisOf(axis, values) {
  const known = values.filter((value) => Number.isFinite(value) && (!axis.log || value > 0));
  // Without a single number there is still an empty frame.
  let low = axis.low ?? (known.length ? Math.min(...known) : 1);
  let high = axis.high ?? (known.length ? Math.max(...known) : 2);
  // A single layer stands in the middle: beside it there is no other to name.
  if (!(high > low) && axis.whole) [low, high] = [low - 0.5, low + 0.5];
  if (!(high > low)) high = axis.log ? low * 2 : low + 1;
  const part = axis.log
    ? (value) => Math.log(value / low) / Math.log(high / low)
    : (value) => (value - low) / (high - low);
  return { ...axis, low, high, part, format: axis.format ?? ((value) => number(value, 2)) };
}

function ticksOf(axis, count) {
  if (axis.ticks) return axis.ticks;
  if (!axis.log) return axis.whole ? wholeTicks(axis.low, axis.high, count) : niceTicks(axis.low, axis.high, count);
  const base = axis.log;
  const first = Math.ceil(Math.log(axis.low) / Math.log(base) - 1e-9);
  const last = Math.floor(Math.log(axis.high) / Math.log(base) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first) / count));
  const ticks = [];
  for (let power = first; power <= last; power += every) ticks.push(base ** power);
  return ticks;
}

class Chart {
  constructor(figure, describe) {
    this.figure = figure;
    this.describe = describe;
    this.box = make("div", { class: "plot" });
    this.legend = make("p", { class: "legend" });
    figure.append(this.legend, this.box);
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.box.addEventListener("pointermove", (event) => this.onMove(event));
    this.box.addEventListener("pointerleave", () => this.say(null));
  }

  draw() {
    const width = this.box.clientWidth;
    if (width < 60) return;
    const spec = this.describe();
    const points = spec.series.flatMap((series) => series.points);
    this.spec = spec;
    this.x = axisOf(spec.x, points.map((point) => point[0]));
    this.y = axisOf(spec.y, points.flatMap((point) => [point[1], ...(point[2] ? [point[1] - point[2], point[1] + point[2]] : [])]));
    this.inner = { width: width - CHART.left - CHART.right, height: CHART.height - CHART.top - CHART.bottom };
    const root = svg("svg", { width, height: CHART.height, role: "img", "aria-label": spec.label });
    root.append(...this.axes(width), ...this.marks());
    for (const series of spec.series) root.append(...this.series(series));
    this.cursor = svg("line", { class: "cursor", y1: CHART.top, y2: CHART.top + this.inner.height, x1: -9, x2: -9 });
    root.append(this.cursor);
    this.box.replaceChildren(root);
    this.say(null);
  }

  px(value) {
    return CHART.left + this.x.part(value) * this.inner.width;
  }

  py(value) {
    const part = this.y.log && !(value > 0) ? 0 : this.y.part(value);
    return CHART.top + (1 - Math.min(Math.max(part, 0), 1)) * this.inner.height;
  }

  axes(width) {
    const parts = [];
    const text = (x, y, words, anchor) => svg("text", { x, y, "text-anchor": anchor }, words);
    for (const tick of ticksOf(this.y, 5)) {
      const y = this.py(tick);
      parts.push(svg("line", { class: "grid", x1: CHART.left, x2: width - CHART.right, y1: y, y2: y }));
      parts.push(text(CHART.left - 6, y + 3.5, this.y.format(tick), "end"));
    }
    const base = CHART.top + this.inner.height;
    for (const tick of ticksOf(this.x, this.inner.width / 55)) {
      parts.push(text(this.px(tick), base + 15, this.x.format(tick), "middle"));
    }
    parts.push(svg("line", { class: "axis", x1: CHART.left, x2: width - CHART.right, y1: base, y2: base }));
    parts.push(text(CHART.left + this.inner.width / 2, base + 31, this.x.label, "middle"));
    return parts;
  }

  marks() {
    return (this.spec.marks || []).flatMap(({ x, y, words }) => {
      const at = x === undefined ? null : this.px(x);
      const line =
        at === null
          ? { x1: CHART.left, x2: CHART.left + this.inner.width, y1: this.py(y), y2: this.py(y) }
          : { x1: at, x2: at, y1: CHART.top, y2: CHART.top + this.inner.height };
      const place = at === null ? { x: CHART.left + this.inner.width, y: this.py(y) + 12, "text-anchor": "end" } : { x: at + 4, y: CHART.top + this.inner.height - 6 };
      return [svg("line", { class: "mark", ...line }), svg("text", place, words || "")];
    });
  }

  series({ points, colour, dash, steps }) {
    const known = points.filter(([x, y]) => Number.isFinite(y) && Number.isFinite(x) && (!this.x.log || x > 0));
    let path = "";
    known.forEach(([x, y], i) => {
      if (steps && i) path += `H${this.px(x)}`;
      path += `${i ? "L" : "M"}${this.px(x)} ${this.py(y)}`;
    });
    const parts = [svg("path", { d: path, stroke: colour, "stroke-dasharray": dash || "none", class: "curve" })];
    for (const [x, y, error] of known) {
      if (error) parts.push(svg("path", { class: "curve", stroke: colour, d: `M${this.px(x)} ${this.py(y - error)}V${this.py(y + error)}` }));
      if (!steps && known.length < 40) parts.push(svg("circle", { cx: this.px(x), cy: this.py(y), r: 2.6, fill: colour }));
    }
    return parts;
  }

  onMove(event) {
    if (!this.spec) return;
    const x = event.clientX - this.box.getBoundingClientRect().left;
    const all = [...new Set(this.spec.series.flatMap((series) => series.points.map((point) => point[0])))];
    const near = all.sort((a, b) => Math.abs(this.px(a) - x) - Math.abs(this.px(b) - x))[0];
    this.say(near);
  }

  /** The legend, with the values under the pointer. */
  say(at) {
    const entries = this.spec.series.map((series) => {
      const point = at === null ? null : series.points.find((candidate) => candidate[0] === at);
      const swatch = svg("svg", { width: 22, height: 8, "aria-hidden": "true" });
      swatch.append(svg("line", { x1: 1, x2: 21, y1: 4, y2: 4, stroke: series.colour, "stroke-width": 2.4, "stroke-dasharray": series.dash || "none" }));
      const value = point ? make("b", {}, ` ${this.y.format(point[1])}`) : "";
      return make("span", {}, swatch, ` ${series.name}`, value);
    });
    const where = at === null ? "" : `${this.x.label.split(",")[0]} ${this.x.format(at)}:`;
    this.legend.replaceChildren(...(where ? [make("span", {}, where)] : []), ...entries);
    const hide = at === null ? -9 : this.px(at);
    this.cursor.setAttribute("x1", hide);
    this.cursor.setAttribute("x2", hide);
  }
}
