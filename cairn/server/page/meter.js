/** What an answer cost, as lines for people. Times are milliseconds of performance.now(). */

// An answer that ended by itself needs no word.
const REASONS = { length: "max tokens reached", stopped: "stopped", error: "failed" };

const seconds = (time) => `${(time / 1000).toFixed(time < 9950 ? 2 : 1)} s`;

export class Meter {
  constructor() {
    this.began = performance.now();
    this.first = null;
    this.last = null;
    this.tokens = 0;
    this.usage = null;
    this.reason = null;
    this.read = null; // [tokens of the prompt that are read, all of them]
  }

  /** A comment of the stream may say how far the prompt is read. */
  hear(comment) {
    const told = /^read (\d+) of (\d+) tokens$/.exec(comment);
    if (told) this.read = [Number(told[1]), Number(told[2])];
  }

  /** Some tokens have come. */
  count(tokens) {
    this.last = performance.now();
    this.first ??= this.last;
    this.tokens += tokens;
  }

  /** The line while nothing has come. */
  waiting() {
    const facts = [[`reading, ${seconds(performance.now() - this.began)}`]];
    if (this.read) {
      const [read, all] = this.read;
      const share = Math.floor((100 * read) / all);
      facts.push([`${read.toLocaleString()} of ${all.toLocaleString()} tokens, ${share}%`, "read"]);
    }
    return facts;
  }

  /** The facts so far: time to the first token, rate, counts, cache, why it ended. */
  facts() {
    const facts = [];
    if (this.first !== null) facts.push([`TTFT ${seconds(this.first - this.began)}`, "ttft"]);
    const tokens = this.usage?.completion_tokens ?? this.tokens;
    // The first token's time is the prompt's: the rate is that of those after it.
    if (tokens > 1 && this.last > this.first) {
      const rate = (tokens - 1) / ((this.last - this.first) / 1000);
      facts.push([`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`, "rate"]);
    }
    facts.push([`${tokens.toLocaleString()} tokens`, "tokens"]);
    if (this.usage) {
      const { prompt_tokens: prompt, prompt_tokens_details: details } = this.usage;
      const cached = details?.cached_tokens ?? 0;
      const sizes = [prompt, cached].map((count) => count.toLocaleString());
      facts.push([`prompt ${sizes[0]}, ${sizes[1]} cached`, "cached"]);
    }
    const reason = REASONS[this.reason];
    if (reason) facts.push([reason, "reason"]);
    return facts;
  }
}
