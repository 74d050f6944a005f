// Small line charts as SVG, of what was prepared in Python: {x, y, series, marks}; an axis is {label, unit, scale, low,
// high, whole, names}, a point [x, y] or [x, y, low, high] with the ends of its 95 % interval.

const CHART = { height: 226, left: 54, right: 12, top: 24, bottom: 36 };

function axisOf(given, values) {
  const unit = given.unit ?? "";
  // Powers of two for multiples, of ten for the rest.
  const axis = { ...given, log: given.scale === "log" ? (unit === "×" ? 2 : 10) : 0 };
  axis.format = (value) => {
    if (axis.names) return axis.names[value] ?? "";
    if (axis.log === 2 && value < 1) return `1/${number(1 / value, 3)}${unit}`;
    return `${axis.whole ? value : Number(number(value, 3).replace("−", "-"))}`.replace("-", "−") + unit;
  };
  const known = values.filter((value) => Number.isFinite(value) && (!axis.log || value > 0));
  // Without a single number there is still an empty frame.
  let low = axis.low ?? (axis.names ? -0.2 : known.length ? Math.min(...known) : 1);
  let high = axis.high ?? (axis.names ? axis.names.length - 0.8 : known.length ? Math.max(...known) : 2);
  // A single layer stands in the middle: beside it there is no other to name.
  if (!(high > low) && axis.whole) [low, high] = [low - 0.5, low + 0.5];
  if (!(high > low)) high = axis.log ? low * 2 : low + 1;
  const part = axis.log
    ? (value) => Math.log(value / low) / Math.log(high / low)
    : (value) => (value - low) / (high - low);
  return { ...axis, low, high, part };
}

function ticksOf(axis, count) {
  if (axis.names) return axis.names.map((_, place) => place);
  if (!axis.log) return axis.whole ? wholeTicks(axis.low, axis.high, count) : niceTicks(axis.low, axis.high, count);
  const base = axis.log;
  const first = Math.ceil(Math.log(axis.low) / Math.log(base) - 1e-9);
  const last = Math.floor(Math.log(axis.high) / Math.log(base) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first) / count));
  const ticks = [];
  for (let power = first; power <= last; power += every) ticks.push(base ** power);
  return ticks;
}

const lineColour = (place) => colours.theme.lines[place % colours.theme.lines.length];

class Chart {
  constructor(figure, spec) {
    this.figure = figure;
    this.spec = spec;
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
    const { spec } = this;
    const points = spec.series.flatMap((series) => series.points);
    this.x = axisOf(spec.x, points.map((point) => point[0]));
    this.y = axisOf(spec.y, points.flatMap((point) => point.slice(1)));
    this.inner = { width: width - CHART.left - CHART.right, height: CHART.height - CHART.top - CHART.bottom };
    const root = svg("svg", { width, height: CHART.height, role: "img", "aria-label": `${this.figure.getAttribute("aria-label")}: ${spec.y.label} over ${spec.x.label}` });
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
    parts.push(text(CHART.left + this.inner.width / 2, base + 31, this.x.label, "middle"), text(2, 12, this.y.label, "start"));
    return parts;
  }

  marks() {
    return this.spec.marks.flatMap(({ axis, at: value, words }) => {
      const at = axis === "x" ? this.px(value) : null;
      const y = value;
      const line =
        at === null
          ? { x1: CHART.left, x2: CHART.left + this.inner.width, y1: this.py(y), y2: this.py(y) }
          : { x1: at, x2: at, y1: CHART.top, y2: CHART.top + this.inner.height };
      const place = at === null ? { x: CHART.left + this.inner.width, y: this.py(y) + 12, "text-anchor": "end" } : { x: at + 4, y: CHART.top + this.inner.height - 6 };
      return [svg("line", { class: "mark", ...line }), svg("text", place, words || "")];
    });
  }

  series({ points, colour: place, dash, kind }) {
    const colour = lineColour(place);
    const steps = kind === "steps";
    const known = points.filter(([x, y]) => Number.isFinite(y) && Number.isFinite(x) && (!this.x.log || x > 0));
    let path = "";
    known.forEach(([x, y], i) => {
      if (steps && i) path += `H${this.px(x)}`;
      path += `${i ? "L" : "M"}${this.px(x)} ${this.py(y)}`;
    });
    const told = known.filter(([, , low, high]) => Number.isFinite(low) && Number.isFinite(high));
    const parts = [];
    if (kind === "bars") {
      for (const [x, , low, high] of told) parts.push(svg("path", { class: "curve", stroke: colour, d: `M${this.px(x)} ${this.py(low)}V${this.py(high)}` }));
    } else if (told.length > 1) {
      const ends = [...told.map(([x, , low]) => [x, low]), ...told.map(([x, , , high]) => [x, high]).reverse()];
      const d = `M${ends.map(([x, y]) => `${this.px(x)} ${this.py(y)}`).join("L")}Z`;
      parts.push(svg("path", { class: "band", fill: colour, d }));
    }
    parts.push(svg("path", { d: path, stroke: colour, "stroke-dasharray": dash, class: "curve" }));
    for (const [x, y] of steps || known.length > 40 ? [] : known) {
      parts.push(svg("circle", { cx: this.px(x), cy: this.py(y), r: 2.6, fill: colour }));
    }
    return parts;
  }

  onMove(event) {
    if (!this.x) return;
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
      swatch.append(svg("line", { x1: 1, x2: 21, y1: 4, y2: 4, stroke: lineColour(series.colour), "stroke-width": 2.4, "stroke-dasharray": series.dash }));
      const value = point ? make("b", {}, ` ${number(point[1], 3)}`) : "";
      return make("span", {}, swatch, ` ${series.name}`, value);
    });
    const where = at === null ? "" : `${this.x.label.split(",")[0]} ${this.x.format(at)}:`;
    this.legend.replaceChildren(...(where ? [make("span", {}, where)] : []), ...entries);
    const hide = at === null ? -9 : this.px(at);
    this.cursor.setAttribute("x1", hide);
    this.cursor.setAttribute("x2", hide);
  }
}
