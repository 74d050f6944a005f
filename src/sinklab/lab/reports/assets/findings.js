// The charts under the explorer: what was measured over whole runs, prepared as for the static figures.

const findings = {
  charts: [],

  setUp(prepared) {
    for (const figure of document.querySelectorAll("[data-chart]")) {
      this.charts.push(new Chart(figure, prepared[figure.dataset.chart]));
    }
  },

  draw() {
    for (const chart of this.charts) chart.draw();
  },
};
