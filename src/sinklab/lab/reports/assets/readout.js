// One line that says everything about the token that is looked at.

class Readout {
  constructor(pane) {
    this.pane = pane;
    this.box = pane.find(".readout");
  }

  draw() {
    const { sample, view, hover } = this.pane;
    const step = hover.step ?? view.step;
    const key = this.pane.key;
    if (key < 0) {
      this.box.replaceChildren(make("span", { class: "how" }, "No key received attention at this step."));
      return;
    }
    const facts = [this.name(step, key), ...this.scores(step, key), ...this.norms(step, key)];
    const heads = sample.counts("main", step, view.layer, MEAN).get(key) || 0;
    facts.push(["main sink of", `${heads} of ${plural(sample.headsOf(view.layer, MEAN).length, "head")}`]);
    const { layer, head } = view;
    const blocked = sample.counts("blocked", step, layer, head).get(key);
    const seen = sample.headsOf(layer, head).length;
    if (blocked) facts.push(["this key", `${sample.run.removal} ${seen > 1 ? `${blocked} of ${seen} heads` : "this head"} at this step`]);
    this.box.replaceChildren(...facts.map(makeFact));
  }

  name(step, key) {
    const { sample } = this.pane;
    const where = positionName(sample, key) + (step === this.pane.view.step ? "" : `, step ${sample.steps[step]}`);
    if (key < sample.added) return [where, "no token of the text", "wide"];
    const position = key - sample.added;
    const token = sample.token(step, position);
    const age = sample.age(step, position);
    if (!token) return [where, age || "not there", "wide"];
    const [id, text, kind] = token;
    const shown = age === "masked" ? MASK_SIGN : `“${visibleText(text)}”`;
    return [`${where} · id ${id} · ${kind}`, `${shown} ${age}`, "wide"];
  }

  scores(step, key) {
    const { sample, view } = this.pane;
    const code = sample.plane(view.layer, view.head)[step * sample.K + key];
    const score = sample.score[code];
    const least = sample.floor(view.layer, view.head);
    const visible = sample.arrays.visible[step];
    const share = code === 0 || !visible ? NaN : score / visible;
    return [
      ["received", code === 0 ? "–" : code === 1 ? `< ${times(least)}` : times(score)],
      ["mean weight", code === 1 ? `< ${percent(least / visible)}` : percent(share)],
    ];
  }

  norms(step, key) {
    const { sample, view } = this.pane;
    const scale = sample.raw.norm_scale;
    return scale ? [["value norm", number(sample.norm("norms", scale, step, view.layer, key))]] : [];
  }
}
