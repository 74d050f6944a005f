// The charts under the explorer: what was measured over whole runs.

const DASHES = ["none", "7 3", "2 3", "8 3 2 3"];

const runColour = (index) => colours.theme.runs[index % colours.theme.runs.length];

/** Series over layers of some facts of every run: {field: words}. The n-th field gets the n-th dash. */
function overLayers(fields) {
  const series = [];
  app.all.forEach((run, index) => {
    Object.entries(fields).forEach(([field, words], n) => {
      const values = run.facts[field] || [];
      if (!values.some(Number.isFinite)) return;
      const name = app.all.length > 1 ? `${run.label}: ${words}` : words;
      const points = run.layers.map((layer, place) => [layer, values[place] ?? NaN]);
      series.push({ name, points, colour: runColour(index), dash: DASHES[n] });
    });
  });
  return series;
}

const layerAxis = { label: "layer", whole: true, format: (value) => String(value) };
const percentAxis = (more) => ({ format: (value) => `${number(100 * value, 3).replace(/\.0+$/, "")} %`, ...more });

const describing = {
  share: () => ({
    label: "Share of attention per layer",
    x: layerAxis,
    y: percentAxis({ low: 0 }),
    series: overLayers({ added_share: "added sink", text_share: "greatest text position" }),
  }),

  norms: () => ({
    label: "Length of value vectors per layer",
    x: layerAxis,
    y: { low: 0 },
    series: overLayers({ added_norm: "added sink", sink_norm: "text sinks", rest_norm: "other text", mask_norm: "masks" }),
  }),

  count: () => ({
    label: "Number of sinks of a head, per layer",
    x: layerAxis,
    y: { low: 0 },
    series: overLayers({ sinks: "sinks of a head" }),
  }),

  motion: () => ({
    label: "Mobility of the main sinks, per layer",
    x: layerAxis,
    y: { low: 0, high: 1 },
    series: overLayers({ mobility: "mobility" }),
  }),

  curve: () => ({
    label: "Share of tokens that are no sinks, over the threshold",
    x: { label: "ε", format: (value) => number(value, 2).replace(/\.0+$/, "") },
    y: percentAxis({ high: 1 }),
    marks: [{ x: 3, words: "ε = 3" }, { y: 0.96, words: "96 %" }],
    series: app.all.filter((run) => run.curve).map((run) => ({
      name: run.label,
      colour: runColour(app.all.indexOf(run)),
      dash: DASHES[app.all.indexOf(run) % 4],
      points: run.curve.epsilon.map((epsilon, i) => [epsilon, run.curve.filtered[i]]),
    })),
  }),

  histogram: () => ({
    label: "How received attention is spread",
    x: { label: "received attention, multiples of an even share", log: 2, format: (value) => (value < 1 ? `1/${1 / value}` : `${value}×`) },
    y: { log: 10, format: (value) => `${Number((100 * value).toPrecision(2))} %` },
    marks: app.all.filter((run) => run.threshold).slice(0, 1).map((run) => ({ x: run.threshold, words: "sinks →" })),
    series: app.all.filter((run) => run.histogram).map((run) => ({
      name: run.label,
      colour: runColour(app.all.indexOf(run)),
      dash: DASHES[app.all.indexOf(run) % 4],
      steps: true,
      points: run.histogram.edges.map((edge, i) => [edge, run.histogram.parts[i] ?? run.histogram.parts.at(-1)]),
    })),
  }),

  heldout: () => ({
    label: "Change of held-out loss over hidden sinks",
    x: { label: "columns hidden per head, K", ticks: heldoutTicks(), format: (value) => String(value) },
    y: { format: (value) => (value > 0 ? `+${number(value, 2)}` : number(value, 2)) },
    marks: [{ y: 0 }],
    series: app.all.flatMap((run, index) => heldoutSeries(run, index)),
  }),
};

function heldoutTicks() {
  return [...new Set(app.all.flatMap((run) => (run.heldout || []).map((row) => row.k)))].sort((a, b) => a - b);
}

function heldoutSeries(run, index) {
  const rows = run.heldout || [];
  const base = rows.filter((row) => row.k === 0).slice(0, 1);
  const controls = [...new Set(rows.filter((row) => row.k > 0).map((row) => row.control))];
  return controls.map((control, n) => ({
    name: `${run.label}: ${control === "sinks" ? "sinks hidden" : `${control} columns hidden`}`,
    colour: runColour(index),
    dash: DASHES[n],
    points: [...base, ...rows.filter((row) => row.control === control && row.k > 0)]
      .sort((a, b) => a.k - b.k)
      .map((row) => [row.k, row.delta, row.error]),
  }));
}

const findings = {
  charts: [],

  setUp() {
    for (const figure of document.querySelectorAll("[data-chart]")) {
      const chart = new Chart(figure, describing[figure.dataset.chart]);
      this.charts.push(chart);
    }
  },

  draw() {
    for (const chart of this.charts) chart.draw();
  },
};
