/** The panel beside the conversation: what a token of an answer read. */
import { PageTexts } from "./pages.js";
import { Strip } from "./strip.js";

const HEIGHT = 230; // pixels of the strip at most
const HEAVIEST = 6; // pages listed with their text
const GAP = 8; // pixels around the tooltip of a page
const BAR = 54; // pixels of the largest share
const REFRESH = 150; // milliseconds between two fetches of texts while an answer streams

const byId = (id) => document.getElementById(id);
const percent = (share) => {
  const value = share * 100;
  return `${value >= 9.95 ? Math.round(value) : value.toFixed(1)}%`;
};
/** A text on one line. */
const flat = (text) => text.replace(/\s+/g, " ").trim();
/** The text of a token for a label: what cannot be seen is named. */
const visible = (text) =>
  text === "" ? "no text yet" : `“${text.replace(/\n/g, "↵").replace(/\t/g, "⇥")}”`;

export class Panel {
  /**
   * @param model as api.model() gives it
   * @param onToken called with (reads, index) when another token is shown
   */
  constructor(model, onToken) {
    this.onToken = onToken;
    this.reads = null;
    this.index = 0;
    this.layer = null;
    this.follow = true;
    this.frame = 0;
    this.listed = 0;
    this.timer = 0;
    this.texts = new WeakMap();
    this.strip = new Strip(byId("strip"), HEIGHT, (point) => this.#peek(point));
    byId("reads").hidden = false;
    byId("layer").append(new Option("all", ""));
    for (const layer of model.layers) byId("layer").append(new Option(String(layer), layer));
    byId("layer").addEventListener("change", ({ target }) => {
      this.layer = target.value === "" ? null : Number(target.value);
      this.refresh();
    });
    byId("token").addEventListener("input", ({ target }) => {
      this.show(this.reads, target.valueAsNumber);
    });
  }

  /** Begin with an answer of which nothing is there yet. */
  start(reads) {
    clearTimeout(this.timer);
    this.reads = reads;
    this.index = 0;
    this.follow = true;
    this.refresh();
  }

  /** Forget everything that was shown. */
  clear() {
    clearTimeout(this.timer);
    this.reads = null;
    byId("reads-empty").hidden = false;
    byId("reads-body").hidden = true;
  }

  /** Look at one token; at the last one, go on with those that follow. */
  show(reads, index) {
    this.reads = reads;
    this.index = index;
    this.follow = index === reads.length - 1;
    this.refresh();
  }

  /** The record has grown: drawn with the next frame, however many tokens came. */
  grown(reads) {
    if (reads !== this.reads) return;
    if (this.follow) this.index = Math.max(0, reads.length - 1);
    this.refresh();
  }

  /** Draw with the next frame. */
  refresh() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.reads?.pages) this.#draw();
    });
  }

  #draw() {
    const { reads, index, layer } = this;
    const { pages, facts } = reads;
    byId("reads-empty").hidden = true;
    byId("reads-body").hidden = false;
    byId("reads-token").hidden = !reads.length;
    byId("legend-fact").hidden = !facts.size;
    byId("strip").setAttribute("aria-valuemax", pages - 1);
    const weights = reads.weights(index, layer);
    const peak = reads.peak(layer);
    const window = reads.length ? reads.windowPages(index) : null;
    this.strip.show({ pages, weights, peak, window, facts });
    byId("peak").textContent = percent(peak);
    byId("reads-count").replaceChildren(
      strong(pages.toLocaleString()),
      reads.length
        ? ` pages, ${weights.size} selected, window ${percent(reads.windowShare(index, layer))}`
        : " pages to read",
    );
    if (reads.length) this.#drawToken(weights);
  }

  #drawToken(weights) {
    const { reads, index } = this;
    const slider = byId("token");
    slider.max = reads.length - 1;
    slider.value = index;
    const name = `${(index + 1).toLocaleString()} of ${reads.length.toLocaleString()}`;
    slider.setAttribute("aria-valuetext", name);
    byId("token-name").textContent = `${name}  ${visible(reads.texts[index])}`;
    this.onToken(reads, index);
    this.#list(weights);
  }

  /** The heaviest pages, at most some times a second: their texts are fetched. */
  #list(weights) {
    clearTimeout(this.timer);
    const wait = this.listed + REFRESH - performance.now();
    if (wait > 0) {
      this.timer = setTimeout(() => this.#list(weights), wait);
      return;
    }
    this.listed = performance.now();
    byId("heaviest-title").hidden = !weights.size;
    const heaviest = [...weights].sort((a, b) => b[1] - a[1]).slice(0, HEAVIEST);
    byId("heaviest").replaceChildren(...heaviest.map(([page, weight]) => this.#row(page, weight)));
  }

  #row(page, weight) {
    const row = document.createElement("li");
    const bar = document.createElement("i");
    bar.style.width = `${(BAR * weight) / this.reads.peak(this.layer)}px`;
    const text = document.createElement("span");
    text.className = "text";
    this.#fill(text, page, flat);
    row.append(cell("page", page.toLocaleString()), cell("share", percent(weight), bar), text);
    row.classList.toggle("has-fact", this.reads.facts.has(page));
    row.title = `page ${page}`;
    return row;
  }

  /** Put the text of a page into an element, when it is there. */
  async #fill(element, page, shape) {
    const { reads } = this;
    if (!this.texts.has(reads)) this.texts.set(reads, new PageTexts(reads));
    element.dataset.page = page;
    let text;
    try {
      text = await this.texts.get(reads).text(page);
    } catch (error) {
      text = error.message;
    }
    if (element.dataset.page === String(page)) element.textContent = shape(text ?? "…");
  }

  #peek(point) {
    const peek = byId("peek");
    peek.hidden = point === null;
    if (point === null) return;
    const { page, first, last, x, y } = point;
    const weight = this.reads.weights(this.index, this.layer).get(page);
    const window = this.reads.windowPages(this.index);
    const facts = [last > first ? `pages ${first}–${last}, shown ${page}` : `page ${page}`];
    if (weight !== undefined) facts.push(percent(weight));
    else if (window && page >= window[0] && page <= window[1]) facts.push("in the window");
    else facts.push(window && page > window[1] ? "written later" : "not read");
    if (this.reads.facts.has(page)) facts.push("holds a hidden fact");
    const title = facts.join(" · ");
    byId("peek-title").textContent = title;
    byId("peek-text").textContent = "…";
    // The text makes it taller when it comes.
    this.#fill(byId("peek-text"), page, (text) => text).then(() => place(peek, x, y));
    byId("strip").setAttribute("aria-valuenow", page);
    byId("strip").setAttribute("aria-valuetext", title);
    place(peek, x, y);
  }
}

/** Put the tooltip of the point (x, y) beside strip and legend: left of them, else above or below. */
function place(peek, x, y) {
  const { clientWidth, clientHeight } = document.documentElement;
  const [strip, legend] = [byId("strip"), byId("legend")].map((e) => e.getBoundingClientRect());
  const within = (at, size, room) => Math.max(GAP, Math.min(room - size - GAP, at));
  const { offsetWidth: width, offsetHeight: height } = peek;
  let left = strip.left - width - 2 * GAP;
  let top = within(y - height / 2, height, clientHeight);
  if (left < GAP) {
    left = within(x - width / 2, width, clientWidth);
    top = strip.top - height - GAP;
    if (top < GAP) top = legend.bottom + GAP;
  }
  peek.style.left = `${left}px`;
  peek.style.top = `${top}px`;
}

function strong(text) {
  const element = document.createElement("strong");
  element.textContent = text;
  return element;
}

function cell(name, text, inside) {
  const element = document.createElement("span");
  element.className = name;
  if (inside) element.append(inside);
  element.append(text);
  return element;
}
