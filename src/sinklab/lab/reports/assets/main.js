// The beginning: read what the page holds, lay out the panes, draw.

/** One pane, or two of different runs side by side. */
app.arrange = async function arrange(count, wanted = {}) {
  const of = (name, index, otherwise) => wanted[name]?.[index] ?? otherwise;
  const shown = this.panes[0]?.view.run ?? 0;
  while (this.panes.length > count) this.panes.pop().element.remove();
  const added = [];
  // Linked panes open on the layer where sinks are strongest in any of them.
  const strength = (run) => Math.max(...run.head_maps[0].values);
  const first = app.runs.reduce((best, run) => (count > 1 && strength(run) > strength(best) ? run : best));
  for (let index = this.panes.length; index < count; index++) {
    const pane = new Pane(index);
    const run = Math.min(Math.max(of("run", index, index === 0 ? 0 : shown === 0 ? 1 : 0), 0), app.runs.length - 1);
    const leader = this.panes[0];
    // Half way there are masks and words: a first look shows what the colours mean.
    pane.view.step = Math.max(of("step", index, app.runs[run].samples[0].T >> 1), 0);
    pane.view.layer = Math.max(of("layer", index, leader?.view.layer ?? first.first_layer), ALL_LAYERS);
    pane.view.head = Math.max(of("head", index, leader?.view.head ?? MEAN), MEAN);
    pane.pinned = of("key", index, -1);
    document.getElementById("panes").append(pane.element);
    added.push([pane, run, Math.max(of("sample", index, leader?.view.sample ?? 0), 0)]);
    this.panes.push(pane);
  }
  for (const [pane, run, sample] of added) await pane.show(run, sample);
  if (added.length && (wanted.step?.length ?? 0) < count) this.goTo(this.panes[0], this.panes[0].view.step);
  this.active = 0;
  this.paint();
};

/** The view of the address. */
async function restore(numbers) {
  const wanted = {};
  for (const name of ["run", "sample", "step", "layer", "head", "key"]) wanted[name] = numbers(name);
  // A phone has room for one run at a time; the button shows both.
  const room = matchMedia("(max-width: 640px)").matches ? 1 : 2;
  await app.arrange(Math.min(wanted.run.length || room, 2, app.runs.length), wanted);
}

async function begin() {
  const content = JSON.parse(document.getElementById("payload").textContent);
  const { theme, numbers } = recalled();
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  const greatest = Math.max(1, ...content.runs.flatMap((run) => run.samples.map((sample) => 2 ** sample.scale.high)));
  colours.setUp(content.palette, greatest);
  for (const run of content.runs) run.samples = run.samples.map((sample) => new Sample(sample, run));
  // A run that recorded no attention has its text and its losses on the page, and nothing to explore.
  app.runs = content.runs.filter((run) => run.samples.length);
  if (!app.runs.length) return;
  controls.setUp();
  await restore(numbers);
  // The page writes its address without this event: it comes from a link, or a reader who pasted another view.
  addEventListener("hashchange", async () => {
    if (!location.hash.includes("=")) return;
    while (app.panes.length) app.panes.pop().element.remove();
    await restore(recalled().numbers);
    document.getElementById("explorer").scrollIntoView();
  });
  document.getElementById("explorer").dataset.ready = "true";
}

begin().catch((error) => {
  const box = document.getElementById("failed");
  box.hidden = false;
  box.textContent = `The explorer could not be drawn: ${error.message}. The figures and tables lie beside this page.`;
  throw error;
});
