// The live page: a socket brings steps as they are computed; two panes show the plain text and the one without a sink.

// Seconds between two attempts to come back to a server that is not heard of any more.
const ATTEMPTS = [1, 2, 4, 8, 16, 30];
// Seconds from which on a page says how long something has taken.
const TEDIOUS = 3;

/** A pass that grows: a sample whose arrays take each step as it comes. */
class Growing extends Sample {
  constructor(run, { keys, scale, total }) {
    super({ index: 0, steps: [], blocks: [], keys, scale, blocked: run.blocked ? 1 : 0, final: "" }, run);
    const { L, H, K, P } = this;
    // Rows of each array, numbers of a row at a step, and their kind.
    this.parts = { heads: [L * H, K, Uint8Array], mean: [L + 1, K, Uint8Array], main: [L * H, 1, Uint16Array], blocked: [L * H, 1, Uint16Array], visible: [1, 1, Uint16Array], ages: [1, P, Uint8Array], tokens: [1, P, Uint32Array] };
    this.arrays = {};
    this.ready = this;
    this.told = [];
    this.resize(total);
  }

  /** Room for so many steps; those that came are added again. */
  resize(T) {
    this.T = T;
    this.steps = [...Array(T).keys()];
    for (const [name, [rows, inner, Kind]] of Object.entries(this.parts)) this.arrays[name] = new Kind(rows * T * inner);
    for (const told of this.told.splice(0)) this.add(told);
  }

  add(told) {
    if (told.step >= this.T) this.resize(2 * told.step);
    this.told.push(told);
    const given = { ...told, blocked: this.blocked(told.step), heads: fromBase64(told.codes.heads), mean: fromBase64(told.codes.mean), tokens: told.tokens.map((token) => this.run.number(token)) };
    for (const [name, [rows, inner]] of Object.entries(this.parts)) {
      for (let row = 0; row < rows; row++) this.arrays[name].set(given[name].slice(row * inner, (row + 1) * inner), (row * this.T + told.step) * inner);
    }
    // What was masked a step before was committed just now.
    const before = (told.step - 1) * this.P;
    for (let place = 0, at = told.step * this.P; told.step && place < this.P; place++, at++) {
      if (AGES[this.arrays.ages[at]] === "committed" && AGES[this.arrays.ages[before + place]] === "masked") this.arrays.ages[at] = AGES.indexOf("just committed");
    }
    this.raw.blocks[told.step] = told.block;
    this.run.head_maps = told.head_maps;
  }

  /** What is blocked in each head at a step, as the array of a run with edits has it. */
  blocked(step) {
    const keys = Array(this.L * this.H).fill(0);
    const { blocked } = this.run;
    if (!blocked || step < blocked.step) return keys;
    for (const one of this.headsOf(blocked.layer ?? ALL_LAYERS, blocked.head ?? MEAN)) keys[one] = blocked.key + 1;
    return keys;
  }
}

const live = {
  socket: null,
  model: null,
  passes: {},
  busy: false,
  attempts: 0,
  asked: 0,
  since: 0,

  connect() {
    this.asked = 0;
    this.socket = new WebSocket(`ws://${location.host}/socket${location.search}`);
    this.socket.addEventListener("message", (event) => this.hear(JSON.parse(event.data)));
    this.socket.addEventListener("close", () => this.lose());
  },

  /** Come back to the server, which is there again after a sleep, or has ended for good. */
  lose() {
    const pause = ATTEMPTS[this.attempts++];
    const end = "The server has gone. Start `sinklab serve` again, and open the address that it prints.";
    this.fail(pause ? "The server is not heard of any more. Connecting again …" : end, true);
    if (pause) setTimeout(() => this.connect(), 1000 * pause);
  },

  hear(told) {
    // What comes of a request that was given up, and was on its way.
    if (told.request && told.request !== this.asked) return;
    const far = (words) => () => this.far(words, told);
    const measuring = far(told.pass === "plain" ? "loss without the edit" : "loss with the edit");
    const does = { model: this.begin, waiting: () => this.state("waiting for another page"), again: far("steps before, again"), step: this.step, measuring, written: this.written, failed: () => this.fail(told.text) };
    does[told.kind]?.call(this, told);
  },

  begin(model) {
    const isBack = this.model !== null;
    this.model = model;
    this.attempts = 0;
    if (!isBack) by("seed").value = model.seed;
    colours.setUp(model.palette, 64);
    this.work(false, "");
    if (!isBack) return;
    // The server keeps a text as long as its page is connected.
    for (const sample of Object.values(this.passes)) sample.done = false;
    this.fail("Connected again. The server has not kept the text of this page: write it again to block a position.");
  },

  ask(what, given = {}) {
    by("failed").hidden = true;
    this.asked += 1;
    this.socket.send(JSON.stringify({ ask: what, ...given }));
  },

  work(busy, words) {
    this.busy = busy;
    this.since = performance.now();
    by("write").disabled = busy;
    by("stop").disabled = !busy;
    by("progress").hidden = !busy;
    by("progress").removeAttribute("value");
    this.state(words);
    this.offer();
  },

  state(words) {
    by("state").textContent = words;
    this.tick();
  },

  /** How long it takes, where it takes long. */
  tick() {
    const seconds = Math.floor((performance.now() - this.since) / 1000);
    by("seconds").textContent = this.busy && seconds >= TEDIOUS ? `${seconds} s` : "";
  },

  far(words, { step, total }) {
    this.state(`${words}: ${step} of ${total}`);
    Object.assign(by("progress"), { max: total, value: step });
  },

  fail(text, gone = false) {
    by("failed").hidden = false;
    by("failed").textContent = text;
    this.work(false, "");
    by("write").disabled = gone;
    if (gone) by("block").hidden = true;
  },

  write() {
    by("cost").hidden = by("block").hidden = by("hints").hidden = true;
    by("tried").tBodies[0].replaceChildren();
    this.passes = {};
    this.follow = true;
    this.ask("write", { prompt: by("prompt").value, new_tokens: Number(by("tokens").value), seed: Number(by("seed").value) });
    this.work(true, "writing");
    // From here on keys move the view; in the prompt they would write.
    document.activeElement.blur();
  },

  block(scope) {
    const { view } = app.panes[0];
    if (this.busy || !this.passes.plain?.done) return;
    const [layer, head] = [scope === "all" ? null : view.layer, scope === "head" ? view.head : null];
    this.blocked = { step: view.step, key: app.panes[0].chosen, layer, head };
    app.panes[0].pin(this.blocked.key);
    delete this.passes.edited;
    this.follow = true;
    this.ask("block", this.blocked);
    this.work(true, "writing again");
  },

  step(told) {
    const sample = this.passes[told.pass] ?? this.open(told);
    sample.add(told);
    this.state(`step ${told.step} of ${told.total - 1}`);
    Object.assign(by("progress"), { max: told.total, value: told.step + 1 });
    const pane = app.panes[told.pass === "plain" ? 0 : 1];
    // Who looks at an earlier step meanwhile is left there.
    if (this.follow) app.goTo(pane, told.step);
    else app.paint();
  },

  /** A pane for a pass that begins. */
  open(told) {
    const { plain } = this.passes;
    const edited = told.pass === "edited";
    const words = edited ? plain.run : { vocabulary: [], numbers: new Map() };
    const run = { label: edited ? `without ${this.name(this.blocked.key)}` : "plain", family: "diffusion", added: told.added, layers: [...Array(this.model.layers).keys()], heads: [...Array(this.model.heads).keys()], head_maps: told.head_maps, first_layer: ALL_LAYERS, removal: "blocked in", vocabulary: words.vocabulary, numbers: words.numbers, blocked: edited ? this.blocked : null };
    run.number = (token) => {
      const id = JSON.stringify(token);
      if (!run.numbers.has(id)) run.numbers.set(id, run.vocabulary.push(token));
      return run.numbers.get(id);
    };
    const sample = new Growing(run, told);
    run.samples = [sample];
    // The steps before are the same.
    if (edited) for (const step of plain.told.slice(0, told.step)) sample.add(step);
    this.passes[told.pass] = sample;
    app.runs[edited ? 1 : 0] = run;
    if (!edited) app.runs.length = 1;
    this.arrange(edited ? 2 : 1, edited ? 1 : 0);
    return sample;
  },

  /** One pane or two; the one of a pass that begins is filled anew. */
  arrange(count, fresh) {
    by("explorer").hidden = false;
    app.keep(count);
    // The plain text stands at the left, the one without a sink at the right.
    while (app.panes.length < count) app.add(new Pane(app.panes.length)).find(".choose-run").inert = true;
    const pane = app.panes[fresh];
    pane.sample = app.runs[fresh].samples[0];
    pane.show(fresh, 0);
    pane.view.key = fresh ? app.panes[0].view.key : -1;
    app.active = 0;
    if (!this.isSetUp) controls.setUp();
    this.isSetUp = true;
  },

  written(told) {
    const sample = this.passes[told.pass];
    if (sample.T !== told.steps) sample.resize(told.steps);
    sample.raw.final = told.text;
    Object.assign(sample, { done: true, final: told.tokens });
    for (const pane of app.panes) if (pane.sample === sample) pane.show(pane.view.run, 0);
    this.work(false, `${told.steps} steps`);
    if (told.measured) this.measured(told.measured);
    else this.choose(sample);
    // Back to the step from which it is blocked; of a new text to the middle, where there is most to see.
    app.goTo(app.panes[0], told.measured ? this.blocked.step : sample.T >> 1);
  },

  /** The view of a first text: the head whose main sink holds most. */
  choose({ run }) {
    const [pane] = app.panes;
    if (pane.view.layer !== ALL_LAYERS) return;
    const { values } = run.head_maps[0];
    const best = values.indexOf(Math.max(...values));
    app.look(pane, Math.floor(best / run.heads.length), best % run.heads.length);
  },

  name(key, { sample, view } = app.panes[0], step = view.step) {
    const place = key - sample.added;
    const token = place < 0 ? null : sample.token(step, place);
    return positionName(sample, key) + (token ? ` “${sample.age(step, place) === "masked" ? MASK_SIGN : visibleText(token[1])}”` : "");
  },

  offer() {
    const pane = app.panes[0];
    const there = pane?.sample?.done && pane.chosen >= 0;
    by("block").hidden = !there;
    if (!there) return;
    const { view } = pane;
    by("which").textContent = `${pane.view.key >= 0 ? "Pinned" : "Main sink"}: ${this.name(pane.chosen)}. Block it from step ${view.step} on:`;
    const offers = [
      ["head", view.head !== MEAN, `in layer ${view.layer}, head ${view.head}`, "Choose a head first: click one in Layer × head"],
      ["layer", view.layer !== ALL_LAYERS, `in layer ${view.layer}`, "Choose a layer first"],
    ];
    for (const [scope, chosen, where, title] of offers) {
      const button = by(`block-${scope}`);
      Object.assign(button, { textContent: chosen ? where : `in one ${scope}`, title: chosen ? "" : title, disabled: this.busy || !chosen });
    }
    by("block-all").disabled = this.busy;
  },

  measured({ plain_loss: before, edited_loss: after, tokens, held, moved, went }) {
    const { plain, edited } = this.passes;
    const { step, key, layer, head } = this.blocked;
    const name = this.name(key, app.panes[0], step);
    const where = layer === null ? "everywhere" : head === null ? `layer ${layer}` : `layer ${layer}, head ${head}`;
    const changed = plain.final.filter(([id], place) => id !== edited.final[place]?.[0]).length;
    const signed = (value) => `${value > 0 ? "+" : ""}${number(value)}`;
    const share = `${changed} of ${plain.final.length}`;
    const facts = [["Δ loss, nats a token", signed(after - before)], [`plain → without, ${plural(tokens, "token")}`, `${number(before)} → ${number(after)}`], ["tokens changed", share], ["main sinks moved", percent(moved)], ["it was the main sink of", `${percent(held)} of heads and steps`]];
    if (went.length) facts.push(["these went to", went.map((to) => this.name(to, app.panes[1], edited.T - 1)).join(", ")]);
    by("cost").hidden = false;
    document.querySelector("#cost .facts").replaceChildren(...facts.map(makeFact));
    document.querySelector("#cost .texts").replaceChildren(this.text("plain", plain, edited), this.text(`without ${name}, ${where}, from step ${step} on`, edited, plain));
    by("tried").tBodies[0].append(make("tr", {}, ...[name, where, step, signed(after - before), share, percent(moved)].map((cell) => make("td", {}, String(cell)))));
  },

  /** What was written, with the tokens marked that another pass has otherwise. */
  text(title, { final }, other) {
    const words = final.map(([id, text], place) => (id === other.final[place]?.[0] ? text : make("mark", {}, text)));
    return make("div", {}, make("h3", {}, title), make("p", { class: "said sample" }, make("span", { class: "prompt" }, by("prompt").value), ...words));
  },

  setUp() {
    by("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.write();
    });
    by("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.busy) by("ask").requestSubmit();
      }
    });
    by("stop").addEventListener("click", () => {
      this.ask("stop");
      this.work(false, "stopped");
    });
    for (const scope of ["head", "layer", "all"]) by(`block-${scope}`).addEventListener("click", () => this.block(scope));
    const { goTo } = app;
    app.goTo = (pane, step) => {
      const last = pane.sample.told.length - 1;
      this.follow = step >= last;
      goTo.call(app, pane, Math.min(step, last));
    };
    const { draw } = app;
    app.draw = () => {
      draw.call(app);
      this.offer();
    };
    const { shortcuts } = controls;
    const own = ["x", "block the position everywhere", { x: () => this.block("all") }];
    controls.shortcuts = () => shortcuts.call(controls).toSpliced(-2, 0, own);
    setInterval(() => this.tick(), 1000);
    this.connect();
    by("prompt").focus();
  },
};

live.setUp();
