/** Texts of pages, each fetched once. */
import { detokenize } from "./api.js";

export class PageTexts {
  #known = new Map();

  /** @param reads the record whose prompt and output the pages hold */
  constructor(reads) {
    this.reads = reads;
  }

  /** The text of a page, or null while the prompt's tokens are not there yet. */
  async text(page) {
    const { promptTokens, perPage, texts } = this.reads;
    if (promptTokens === null) return null;
    const first = page * perPage;
    const prompt = promptTokens.slice(first, first + perPage);
    const written = texts.slice(
      Math.max(0, first - promptTokens.length),
      Math.max(0, first + perPage - promptTokens.length),
    );
    return (prompt.length ? await this.#fetch(page, prompt) : "") + written.join("");
  }

  #fetch(page, tokens) {
    if (!this.#known.has(page)) {
      const text = detokenize(tokens);
      // A failure is not kept: the next look asks again.
      text.catch(() => this.#known.delete(page));
      this.#known.set(page, text);
    }
    return this.#known.get(page);
  }
}
