/** Which pages an answer's tokens read. */

// A colour scale that ended lower would show what hardly counts.
const LEAST_PEAK = 0.05;

/** The record of one answer, filled while it streams. */
export class Reads {
  /** @param model as api.model() gives it */
  constructor(model) {
    this.pageSize = model.pageSize;
    // The last slot of a page is its landmark: the others hold tokens.
    this.perPage = model.pageSize - 1;
    this.windowSlots = model.window;
    this.promptTokens = null; // ids, once the server has told them
    this.tokens = []; // per generated token a list of {layer, pages, weights, window}
    this.texts = []; // per generated token the text that came with it
    this.peaks = new Map(); // layer or null -> the largest share that a page had so far
    this.facts = new Set(); // pages where the example hid what was asked for
  }

  /** Add what a chunk brought; text that comes late stands with the last token. */
  add(selection, text) {
    for (const layers of selection) {
      this.tokens.push(layers);
      this.texts.push("");
      for (const layer of [null, ...layers.map((read) => read.layer)]) {
        const shares = this.weights(this.length - 1, layer).values();
        this.peaks.set(layer, Math.max(this.peak(layer), ...shares));
      }
    }
    if (text && this.texts.length) this.texts[this.texts.length - 1] += text;
  }

  /** The largest share of a page among all tokens: the end of the colour scale. */
  peak(layer) {
    return this.peaks.get(layer) ?? LEAST_PEAK;
  }

  get length() {
    return this.tokens.length;
  }

  /** Pages that hold the prompt and what was generated so far. */
  get pages() {
    if (this.promptTokens === null) return this.#highest() + 1;
    return this.pageOf(Math.max(0, this.promptTokens.length + this.length - 1)) + 1;
  }

  /** The page that holds user token number `token`. */
  pageOf(token) {
    return Math.floor(token / this.perPage);
  }

  /** Page -> share of the output that generated token `index` took from it; layer null: all. */
  weights(index, layer) {
    const layers = this.#of(index, layer);
    const sum = new Map();
    for (const { pages, weights } of layers) {
      pages.forEach((page, i) => sum.set(page, (sum.get(page) ?? 0) + weights[i] / layers.length));
    }
    return sum;
  }

  /** Share of the output that came from the window. */
  windowShare(index, layer) {
    const layers = this.#of(index, layer);
    return layers.reduce((sum, { window }) => sum + window / layers.length, 0);
  }

  /** First and last page of the window of the query that produced token `index`. */
  windowPages(index) {
    if (this.promptTokens === null) return null;
    const token = this.promptTokens.length + index - 1;
    const slot = token + Math.floor(token / this.perPage);
    const last = Math.floor(slot / this.pageSize);
    const reach = Math.floor((slot - this.windowSlots + 1) / this.pageSize);
    return [Math.min(last, Math.max(0, reach)), last];
  }

  #of(index, layer) {
    const layers = this.tokens[index] ?? [];
    return layer === null ? layers : layers.filter((read) => read.layer === layer);
  }

  #highest() {
    let highest = -1;
    for (const layers of this.tokens) {
      for (const { pages } of layers) for (const page of pages) highest = Math.max(highest, page);
    }
    return highest;
  }
}
