// What the page holds: packed arrays become typed arrays, samples answer questions about one (step, layer, head).
// T steps, L layers, H heads, K keys (added sinks first, then canvas positions). Codes are 8-bit: 0 means absent,
// 1 below the scale, the rest are even steps of the logarithm.

const MEAN = -1;
const ALL_LAYERS = -1;

const fromBase64 = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));

async function unpack(packed) {
  // A Response of a stream in memory: nothing is fetched.
  const stream = new Blob([fromBase64(packed.data)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(stream).arrayBuffer();
  const values = packed.bytes === 2 ? new Uint16Array(bytes) : new Uint8Array(bytes);
  // Stored as differences to the row before; typed arrays wrap as the writer did.
  if (packed.delta) for (let i = packed.delta; i < values.length; i++) values[i] += values[i - packed.delta];
  return values;
}

/** Values of the 256 codes of a logarithmic scale {low, high, levels} (low and high are powers of two). */
function decodeTable(scale) {
  const table = new Float32Array(256).fill(2 ** scale.high);
  table[0] = NaN;
  table[1] = 0;
  for (let level = 0; level < scale.levels; level++) {
    table[level + 2] = 2 ** (scale.low + ((scale.high - scale.low) * level) / Math.max(scale.levels - 1, 1));
  }
  return table;
}

class Sample {
  constructor(raw, run) {
    this.raw = raw;
    this.run = run;
    this.added = run.added;
    this.steps = raw.steps;
    this.T = raw.steps.length;
    this.L = run.layers.length;
    this.H = run.heads.length;
    this.K = raw.keys;
    this.P = raw.keys - run.added;
    this.score = decodeTable(raw.scale);
  }

  /** Unpacks the arrays, once. */
  open() {
    this.ready ??= this.unpackAll();
    return this.ready;
  }

  async unpackAll() {
    const named = Object.entries(this.raw.arrays).map(async ([name, packed]) => [name, await unpack(packed)]);
    this.arrays = Object.fromEntries(await Promise.all(named));
    return this;
  }

  /** Codes (T, K) of received attention in one layer and head; MEAN and ALL_LAYERS are means. */
  plane(layer, head) {
    const cells = this.T * this.K;
    // The mean over all layers stands in front of those over the heads of each.
    if (layer === ALL_LAYERS || head === MEAN) return this.arrays.mean.subarray((layer + 1) * cells, (layer + 2) * cells);
    const one = layer * this.H + head;
    return this.arrays.heads.subarray(one * cells, (one + 1) * cells);
  }

  /** The least amount that a view tells apart from none; single heads may have a higher floor. */
  floor(layer, head) {
    const least = 2 ** this.raw.scale.low;
    return head === MEAN || layer === ALL_LAYERS ? least : Math.max(this.raw.floor ?? 0, least);
  }

  /** Numbers of the heads that a view shows, first to last, as the arrays count them: all layers', a layer's, or one. */
  headsOf(layer, head) {
    const [from, count] = layer === ALL_LAYERS ? [0, this.L * this.H] : head === MEAN ? [layer * this.H, this.H] : [layer * this.H + head, 1];
    return Array.from({ length: count }, (_, place) => from + place);
  }

  /** In how many heads of a view each key is "main", the main sink, or "blocked" at one step. */
  counts(name, step, layer, head) {
    const counts = new Map();
    const most = name === "main" ? 1 : this.raw.blocked;
    for (const one of most ? this.headsOf(layer, head) : []) {
      const start = (one * this.T + step) * most;
      // 0 is none.
      for (const number of this.arrays[name].subarray(start, start + most)) if (number) counts.set(number - 1, (counts.get(number - 1) || 0) + 1);
    }
    return counts;
  }

  /** The keys that a view hatches at one step: those blocked in at least half of its heads. */
  hatched(step, { layer, head }) {
    const heads = this.headsOf(layer, head).length;
    return [...this.counts("blocked", step, layer, head)].filter(([, count]) => 2 * count >= heads).map(([key]) => key);
  }

  /** The key that receives most in a view: the main sink of a head, or the greatest of a mean; -1 where there is none. */
  mainOf(step, layer, head) {
    if (layer !== ALL_LAYERS && head !== MEAN) return this.arrays.main[(layer * this.H + head) * this.T + step] - 1;
    const row = this.plane(layer, head).subarray(step * this.K, (step + 1) * this.K);
    const most = Math.max(...row);
    return most ? row.indexOf(most) : -1;
  }

  /** Row of the vocabulary at a position and step; null where nothing was recorded, and of added sinks, whose positions are below 0. */
  token(step, position) {
    const index = position < 0 ? 0 : this.arrays.tokens[step * this.P + position];
    return index ? this.run.vocabulary[index - 1] : null;
  }

  /** Name of what a position holds: added, masked, just committed, committed, prompt; "" where it does not exist yet. */
  age(step, position) {
    return position < 0 ? "added" : AGES[this.arrays.ages[step * this.P + position]];
  }

  /** A norm of a key, in a layer or as the mean over all; `scale` is what decodes the array. */
  norm(name, scale, step, layer, key) {
    const table = decodeTable(scale);
    const layers = layer === ALL_LAYERS ? [...this.run.layers.keys()] : [layer];
    const norms = layers.map((one) => table[this.arrays[name][(one * this.T + step) * this.K + key]]);
    return norms.reduce((sum, norm) => sum + norm, 0) / norms.length;
  }
}

const AGES = ["", "masked", "just committed", "committed", "prompt"];
