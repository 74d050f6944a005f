// The beginning: read what the page holds, lay out the panes, draw.

/** One pane, or two of different runs side by side; `wanted` has numbers of each, by the names of the address. */
app.arrange = async function arrange(count, wanted = {}) {
  this.keep(count);
  const before = this.panes.length;
  // Linked panes open on the layer where sinks are strongest in any of them.
  const strength = (run) => Math.max(...run.head_maps[0].values);
  const first = app.runs.reduce((best, run) => (count > 1 && strength(run) > strength(best) ? run : best));
  for (let index = before; index < count; index++) {
    const pane = this.add(new Pane(index));
    if (!index) pane.view.layer = first.first_layer;
    else pane.view.run = this.panes[0].view.run ? 0 : 1;
    for (const name of Object.keys(pane.view)) pane.view[name] = Math.max(wanted[name]?.[index] ?? pane.view[name], -1);
    pane.view.run = clamp(pane.view.run, app.runs.length - 1);
    // Half way there are masks and words: a first look shows what the colours mean.
    pane.view.step = wanted.step?.[index] ?? app.runs[pane.view.run].samples[0].T >> 1;
    pane.view.key = wanted.key?.[index] ?? -1;
  }
  for (const pane of this.panes.slice(before)) await pane.show(pane.view.run, pane.view.sample);
  if (before < count && (wanted.step?.length ?? 0) < count) this.goTo(this.panes[0], this.panes[0].view.step);
  this.active = 0;
  this.paint();
};

/** The view of the address. */
async function restore(wanted) {
  // A phone has room for one run at a time; the button shows both.
  const room = matchMedia("(max-width: 640px)").matches ? 1 : 2;
  await app.arrange(Math.min(wanted.run?.length || room, 2, app.runs.length), wanted);
}

async function begin() {
  const content = JSON.parse(by("payload").textContent);
  const { theme, wanted } = recalled();
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  const greatest = Math.max(1, ...content.runs.flatMap((run) => run.samples.map((sample) => 2 ** sample.scale.high)));
  colours.setUp(content.palette, greatest);
  for (const run of content.runs) run.samples = run.samples.map((sample) => new Sample(sample, run));
  // A run that recorded no attention has its text and its losses on the page, and nothing to explore.
  app.runs = content.runs.filter((run) => run.samples.length);
  if (!app.runs.length) return;
  controls.setUp();
  await restore(wanted);
  // The page writes its address without this event: it comes from a link, or a reader who pasted another view.
  addEventListener("hashchange", async () => {
    if (!location.hash.includes("=")) return;
    app.keep(0);
    await restore(recalled().wanted);
    by("explorer").scrollIntoView();
  });
  by("explorer").dataset.ready = "true";
}

begin().catch((error) => {
  const box = by("failed");
  box.hidden = false;
  box.textContent = `The explorer could not be drawn: ${error.message}. The figures and tables lie beside this page.`;
  throw error;
});
