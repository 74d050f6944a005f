// Words and numbers as they are shown, and the elements that hold them.

const by = (id) => document.getElementById(id);
const clamp = (value, most) => Math.min(Math.max(value, 0), most);

const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  // Strings become text nodes, so nothing that a run holds is read as HTML.
  element.append(...children);
  return element;
};

const makeFact = ([label, value, kind = ""]) => make("span", { class: `fact ${kind}` }, make("small", {}, label), make("b", {}, value));

function number(value, significant = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(significant - 1).replaceAll("-", "−");
  const digits = size === 0 ? 0 : Math.max(0, significant - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(digits).replace("-", "−");
}

const times = (value) => `${number(value)}×`;
const percent = (value) => (value == null || Number.isNaN(value) ? "–" : `${number(100 * value)} %`);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** A token's text on one line, white space visible. */
function visibleText(text) {
  if (text === "") return "∅";
  const seen = text.replaceAll("\r", "␍").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
  // Zero-width and direction marks would hide or reorder what stands around them.
  return seen.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (sign) => `⟨U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** A token's text as it runs on the canvas: line breaks break, and are seen. */
function runningText(text) {
  return text === "" ? "∅" : text.replaceAll("\r", "").replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}

function viewName(sample, view) {
  const run = sample.run;
  if (view.layer === ALL_LAYERS) return "mean over all layers and heads";
  const layer = `layer ${run.layers[view.layer]}`;
  return view.head === MEAN ? `${layer}, mean over heads` : `${layer}, head ${run.heads[view.head]}`;
}

function positionName(sample, key) {
  if (key >= sample.added) return `position ${key - sample.added}`;
  return sample.added > 1 ? `added sink ${key + 1}` : "added sink";
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
