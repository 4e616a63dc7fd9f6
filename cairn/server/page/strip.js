/** The strip: the context as cells, one a page, left to right and line after line. */

const LARGEST = 18;
const SMALLEST = 4;

/** Cell size in pixels, columns, rows and pages per cell, for `pages` in a width and height. */
export function layout(pages, width, height) {
  for (let size = LARGEST; size >= SMALLEST; size--) {
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(pages / columns);
    if (rows * size <= height) return { size: width / columns, columns, rows, perCell: 1 };
  }
  const columns = Math.max(1, Math.floor(width / SMALLEST));
  const perCell = Math.ceil(pages / (columns * Math.floor(height / SMALLEST)));
  const rows = Math.ceil(Math.ceil(pages / perCell) / columns);
  return { size: width / columns, columns, rows, perCell };
}

function colours(element) {
  const style = getComputedStyle(element);
  const read = (name) => style.getPropertyValue(name).trim();
  const rgb = (name) => [1, 3, 5].map((at) => parseInt(read(name).slice(at, at + 2), 16));
  return {
    cell: read("--cell"),
    window: read("--window"),
    fact: read("--good"),
    cursor: read("--ink"),
    heat: [rgb("--heat-0"), rgb("--heat-1"), rgb("--heat-2")],
  };
}

/** The colour at a place of the scale, 0 to 1. */
function heat(stops, at) {
  const place = Math.min(1, at);
  const i = place < 0.5 ? 0 : 1;
  const part = place * 2 - i;
  const mix = stops[i].map((low, c) => Math.round(low + (stops[i + 1][c] - low) * part));
  return `rgb(${mix.join(" ")})`;
}

export class Strip {
  /**
   * @param canvas where to draw
   * @param height most pixels it may take
   * @param onPoint called with {page, first, last, x, y} under the pointer or cursor, or null
   */
  constructor(canvas, height, onPoint) {
    this.canvas = canvas;
    this.height = height;
    this.onPoint = onPoint;
    this.view = null;
    this.cursor = null; // a cell
    canvas.addEventListener("pointermove", (event) => this.#point(this.#cellAt(event)));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    canvas.addEventListener("blur", () => this.#point(null));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Show {pages, weights: Map, peak, window: [first, last] or null, facts: Set}. */
  show(view) {
    this.view = view;
    this.draw();
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!this.view || !width) return;
    const grid = (this.grid = layout(this.view.pages, width, this.height));
    this.cells = Math.ceil(this.view.pages / grid.perCell);
    const ratio = devicePixelRatio || 1;
    const height = Math.round(grid.rows * grid.size) + 1;
    if (this.canvas.width !== Math.round(width * ratio)) {
      this.canvas.width = Math.round(width * ratio);
    }
    if (this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.#paint(pen, colours(this.canvas));
  }

  #paint(pen, colour) {
    const { size, columns, perCell } = this.grid;
    const gap = size > 5 ? 1 : 0.5;
    // Whole pixels: the edges of cells are sharp, however the width divides.
    const box = (cell) => {
      const [column, row] = [cell % columns, Math.floor(cell / columns)];
      const [x, y] = [Math.round(column * size), Math.round(row * size)];
      return [x, y, Math.round((column + 1) * size) - x - gap, Math.round((row + 1) * size) - y - gap];
    };
    const fill = (cell, style) => {
      pen.fillStyle = style;
      pen.fillRect(...box(cell));
    };
    const ring = (cell, style) => {
      const [x, y, width, height] = box(cell);
      // A small cell would vanish under a ring inside it.
      const inset = size < 12 ? -1 : 1;
      pen.strokeStyle = style;
      pen.lineWidth = 2;
      pen.strokeRect(x + inset, y + inset, width - 2 * inset, height - 2 * inset);
    };
    const cellOf = (page) => Math.floor(page / perCell);
    for (let cell = 0; cell < this.cells; cell++) fill(cell, colour.cell);
    if (this.view.window) {
      const [first, last] = this.view.window.map(cellOf);
      for (let cell = first; cell <= last; cell++) fill(cell, colour.window);
    }
    const { peak } = this.view;
    for (const [cell, weight] of this.binned()) fill(cell, heat(colour.heat, weight / peak));
    for (const page of this.view.facts) ring(cellOf(page), colour.fact);
    if (this.cursor !== null && this.cursor < this.cells) ring(this.cursor, colour.cursor);
  }

  /** Cell -> weight of its pages together. */
  binned() {
    const cells = new Map();
    for (const [page, weight] of this.view.weights) {
      const cell = Math.floor(page / this.grid.perCell);
      cells.set(cell, (cells.get(cell) ?? 0) + weight);
    }
    return cells;
  }

  #cellAt(event) {
    if (!this.grid) return null;
    const column = Math.floor(event.offsetX / this.grid.size);
    const cell = Math.floor(event.offsetY / this.grid.size) * this.grid.columns + column;
    return column >= 0 && column < this.grid.columns && cell >= 0 && cell < this.cells ? cell : null;
  }

  #key(event) {
    if (!this.grid) return;
    const { columns } = this.grid;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const last = this.cells - 1;
    let cell = this.cursor ?? 0;
    if (event.key in steps) cell += steps[event.key];
    else if (event.key === "Home") cell = 0;
    else if (event.key === "End") cell = last;
    else return;
    event.preventDefault();
    this.#point(Math.min(last, Math.max(0, cell)));
  }

  #point(cell) {
    if (cell === this.cursor) return;
    this.cursor = cell;
    this.draw();
    this.onPoint(cell === null ? null : this.#pointed(cell));
  }

  /** What a cell stands for: its pages, and the one that was read most. */
  #pointed(cell) {
    const { size, columns, perCell } = this.grid;
    const first = cell * perCell;
    const last = Math.min(this.view.pages, first + perCell) - 1;
    let page = first;
    const weight = (p) => this.view.weights.get(p) ?? 0;
    for (let p = first; p <= last; p++) if (weight(p) > weight(page)) page = p;
    const box = this.canvas.getBoundingClientRect();
    const x = box.left + ((cell % columns) + 0.5) * size;
    const y = box.top + (Math.floor(cell / columns) + 1) * size;
    return { page, first, last, x, y };
  }
}
