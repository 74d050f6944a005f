// Colours: one scale from nothing to much, as in the static figures; the rest comes from the style sheet.

const colours = {
  palette: null,
  probe: null,
  cache: new Map(),
  // An even share and less is blank: what stands out is what is coloured.
  low: 1,
  high: 64,

  setUp(palette, greatest) {
    this.palette = palette;
    this.probe = make("span", { hidden: true });
    document.body.append(this.probe);
    this.high = Math.max(2 ** Math.ceil(Math.log2(Math.max(greatest, 1))), 4);
  },

  get dark() {
    return Number(getComputedStyle(document.documentElement).getPropertyValue("--dark")) === 1;
  },

  get scale() {
    return this.palette[this.dark ? "dark" : "light"];
  },

  /** The value of a custom property of the style sheet as an rgb() text. */
  of(name) {
    if (!this.cache.has(name)) {
      // A property with light-dark() resolves only where it is used.
      this.probe.style.color = `var(--${name})`;
      this.cache.set(name, getComputedStyle(this.probe).color);
    }
    return this.cache.get(name);
  },

  /** Where a value lies on the scale, 0 to 1; 0 for nothing. */
  place(value) {
    if (!(value > this.low)) return 0;
    return Math.min(Math.log2(value / this.low) / Math.log2(this.high / this.low), 1);
  },

  rgb(value) {
    const stops = this.scale.map((hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16)));
    const at = this.place(value) * (stops.length - 1);
    const below = Math.min(Math.floor(at), stops.length - 2);
    return stops[below].map((part, i) => Math.round(part + (at - below) * (stops[below + 1][i] - part)));
  },

  /** For each of the 256 codes of a sample: background, and an ink that can be read on it. */
  table(sample) {
    return Array.from(sample.score, (value) => {
      const rgb = this.rgb(value);
      return { rgb, css: `rgb(${rgb})`, ink: this.ink(rgb), plain: this.place(value) === 0 };
    });
  },

  /** Black or white, whichever contrasts more (never below 4.5): both do alike at a luminance of 0.18. */
  ink(rgb) {
    const linear = rgb.map((part) => (part <= 10 ? part / 3295 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 ? "#000000" : "#ffffff";
  },

  /** Ticks of the scale: powers of two, thinned to at most seven. */
  ticks() {
    const all = [];
    for (let value = this.low; value <= this.high; value *= 2) all.push(value);
    const every = Math.ceil((all.length - 1) / 6);
    return all.filter((value) => Math.log2(value) % every === 0);
  },
};
