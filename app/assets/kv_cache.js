// The block map: one cell a block, drawn when something has changed. Says what it drew in the canvas's data attributes.
// Text comes from requests' ids and from prompts: textContent only.

const CELL_SIZES = [28, 24, 20, 16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2];
const MAX_HEIGHT = 520;
const PAINTED = 7; // cells of fewer pixels are painted as pixels
const views = new WeakMap();

export default function ({ data, parentElement }) {
  if (!views.has(parentElement)) {
    views.set(parentElement, new BlockMapView(parentElement));
  }
  const view = views.get(parentElement);
  view.update(data);
  return () => {
    view.close();
    views.delete(parentElement);
  };
}

// Byte by byte in a plain loop: a callback for each of half a million takes ten times as long.
function isSame(first, second) {
  if (first?.length !== second.length) return false;
  for (let index = 0; index < first.length; index++) if (first[index] !== second[index]) return false;
  return true;
}

class BlockMapView {
  constructor(parent) {
    this.root = parent.querySelector(".kv");
    this.canvas = this.root.querySelector("canvas");
    this.cursor = this.root.querySelector(".cursor");
    this.tip = this.root.querySelector(".tip");
    this.pinned = null; // a request's id: it stays pinned from step to step
    this.at = null; // block under the pointer or the keyboard's cursor
    this.draws = 0;
    this.painter = new CellPainter();
    this.observer = new ResizeObserver(() => this.pool && this.draw());
    this.observer.observe(this.root);
    this.canvas.onpointermove = (event) => this.point(this.blockAt(event));
    this.canvas.onpointerleave = () => this.point(null);
    this.canvas.onblur = () => this.point(null);
    this.canvas.onpointerdown = (event) => this.point(this.blockAt(event));
    this.canvas.onclick = () => this.pin(this.at);
    this.canvas.onkeydown = (event) => this.key(event);
  }

  close() {
    this.observer.disconnect();
  }

  update(bytes) {
    if (!isSame(this.bytes, bytes)) {
      this.bytes = bytes;
      this.pool = parse(bytes);
      this.drawn = null;
    }
    this.draw();
  }

  layout() {
    const { num_blocks } = this.pool;
    const context = this.canvas.getContext("2d");
    context.font = "10px sans-serif";
    const gutter = Math.ceil(context.measureText(number(num_blocks)).width) + 8;
    const room = this.root.clientWidth - gutter;
    const columnsOf = (size) => {
      const columns = Math.max(1, Math.floor(room / size));
      return columns >= 20 ? columns - (columns % 10) : columns; // rows that begin with round numbers
    };
    const fits = (size) => Math.ceil(num_blocks / columnsOf(size)) * size <= MAX_HEIGHT;
    const size = CELL_SIZES.find(fits) ?? CELL_SIZES.at(-1);
    const columns = Math.min(columnsOf(size), num_blocks);
    return { gutter, size, columns, rows: Math.ceil(num_blocks / columns), ratio: window.devicePixelRatio || 1 };
  }

  // What the picture depends on beside the pool.
  look() {
    const style = getComputedStyle(this.root);
    const theme = { text: "--st-text-color", back: "--st-background-color", line: "--st-border-color" };
    for (const name in theme) theme[name] = style.getPropertyValue(theme[name]).trim();
    return { ...this.layout(), ...theme, pinned: this.pinned };
  }

  draw() {
    if (!this.root.clientWidth) return;
    const look = this.look();
    const signature = JSON.stringify(look);
    if (signature === this.drawn) return;
    this.drawn = signature;
    this.place = look;
    const { canvas, pool } = this;
    const width = look.gutter + look.columns * look.size;
    const height = look.rows * look.size;
    canvas.width = Math.round(width * look.ratio);
    canvas.height = Math.round(height * look.ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(look.ratio, look.ratio);
    this.drawGutter(context, look);
    this.drawCells(context, look);
    this.draws++;
    this.report(look);
    this.point(this.at);
  }

  drawGutter(context, { gutter, size, columns, rows, text }) {
    context.fillStyle = text;
    context.globalAlpha = 0.65;
    context.font = "10px sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(14 / size) * (size < 8 ? 4 : 1);
    for (let row = 0; row < rows; row += every) {
      context.fillText(number(row * columns + 1), gutter - 5, Math.max(6, (row + 0.5) * size));
    }
  }

  drawCells(context, look) {
    const { pool } = this;
    const { gutter, size, columns } = look;
    const pinned = pool.requests.findIndex((request) => request.id === this.pinned);
    const bright = new Uint8Array(pool.num_blocks + 1).fill(pinned < 0 ? 1 : 0);
    for (const { request, blocks } of pool.lists) if (request === pinned) for (const id of blocks) bright[id] = 1;
    if (size < PAINTED) {
      context.globalAlpha = 1;
      context.imageSmoothingEnabled = false;
      context.drawImage(this.painter.paint(pool, look, bright), gutter, 0);
      return;
    }
    const side = size - 1;
    const evictable = this.evictableCell(side, look.ratio);
    context.textAlign = "center";
    context.font = `600 ${Math.round(size * 0.55)}px sans-serif`;
    for (let id = 1; id <= pool.num_blocks; id++) {
      const x = gutter + ((id - 1) % columns) * size;
      const y = Math.floor((id - 1) / columns) * size;
      const opacity = bright[id] ? 1 : DIMMED;
      context.globalAlpha = opacity;
      const state = stateOf(pool, id);
      if (state === "free") {
        context.fillStyle = look.line;
        context.fillRect(x, y, side, side);
      } else if (state === "evictable") {
        context.drawImage(evictable, x, y, side, side);
      } else if (state === "shared") {
        context.fillStyle = look.text;
        context.fillRect(x, y, side, side);
        context.fillStyle = size >= 14 ? look.back : pool.requests[pool.lists[pool.firstList[id]].request].colour;
        if (size >= 14) context.fillText(pool.refCounts[id], x + side / 2, y + side / 2 + 1);
        else context.fillRect(x + side / 3, y + side / 3, side / 3, side / 3);
      } else {
        const { request } = pool.lists[pool.firstList[id]];
        const filled = (tokensIn(pool, request, pool.firstPlace[id]) ?? pool.block_size) / pool.block_size;
        context.fillStyle = pool.requests[request].colour;
        if (filled < 1) {
          context.globalAlpha = opacity * EMPTY;
          context.fillRect(x, y, side, side);
          context.globalAlpha = opacity;
        }
        context.fillRect(x, y + side * (1 - filled), side, side * filled);
      }
    }
    context.globalAlpha = 1;
  }

  // A cell with a texture that no held block has: drawn once, since thousands of its lines take longer than all else.
  evictableCell(side, ratio) {
    const cell = document.createElement("canvas");
    cell.width = cell.height = Math.ceil(side * ratio);
    const context = cell.getContext("2d");
    context.scale(cell.width / side, cell.height / side);
    context.strokeStyle = this.pool.evictable;
    context.strokeRect(0.5, 0.5, side - 1, side - 1);
    context.beginPath();
    for (let from = 3; from < 2 * side; from += 4) {
      context.moveTo(Math.max(0, from - side), Math.min(from, side));
      context.lineTo(Math.min(from, side), Math.max(0, from - side));
    }
    context.stroke();
    return cell;
  }

  report(look) {
    const { pool, canvas } = this;
    const { held, shared, evictable, free } = pool.counts;
    Object.assign(canvas.dataset, pool.counts, { step: pool.step, draws: this.draws, pinned: this.pinned ?? "" });
    Object.assign(canvas.dataset, { size: look.size, columns: look.columns, gutter: look.gutter });
    canvas.setAttribute(
      "aria-label",
      `KV blocks at step ${pool.step}: ${held} held by one request, ${shared} shared, ${evictable} evictable, ${free} free`,
    );
    for (const [state, count] of Object.entries(pool.counts)) {
      this.root.querySelector(`[data-count=${state}]`).textContent = number(count);
    }
    this.root.querySelector(".filling").hidden = look.size < PAINTED;
    ["first", "second", "third"].forEach((name, index) =>
      this.root.style.setProperty(`--kv-${name}`, pool.legend[index]),
    );
    this.root.style.setProperty("--kv-cached", pool.evictable);
    this.root.querySelector(".pin").textContent = this.pinText();
  }

  pinText() {
    if (this.pinned === null) return "Click a block to pin its request.";
    const request = this.pool.requests.find(({ id }) => id === this.pinned);
    if (!request) return "The pinned request holds no block in this step. Escape lets it go.";
    const tokens = request.tokens === null ? "" : `, ${number(request.tokens)} tokens`;
    return `Pinned: request ${request.name}, ${number(request.blocks)} blocks${tokens}. Click it again, or Escape, lets it go.`;
  }

  blockAt(event) {
    const { gutter, size, columns } = this.place;
    const column = Math.floor((event.offsetX - gutter) / size);
    const id = Math.floor(event.offsetY / size) * columns + column + 1;
    return column >= 0 && column < columns && id >= 1 && id <= this.pool.num_blocks ? id : null;
  }

  point(id) {
    this.at = id !== null && id <= this.pool.num_blocks ? id : null;
    this.cursor.hidden = this.tip.hidden = this.at === null;
    if (this.at === null) return;
    const { gutter, size, columns } = this.place;
    const x = gutter + ((id - 1) % columns) * size;
    const y = Math.floor((id - 1) / columns) * size;
    const grown = Math.max(0, (8 - size) / 2); // a cell of two pixels would vanish under its own frame
    const box = { left: x - 2 - grown, top: y - 2 - grown, width: size + 3 + 2 * grown, height: size + 3 + 2 * grown };
    for (const name in box) this.cursor.style[name] = `${box[name]}px`;
    this.tip.querySelector(".what").textContent = describe(this.pool, id);
    this.tip.querySelector(".text").textContent = textOf(this.pool, id) ?? "";
    const room = this.root.clientWidth;
    const left = x + size + 12 + this.tip.offsetWidth > room ? x - 12 - this.tip.offsetWidth : x + size + 12;
    this.tip.style.left = `${Math.max(0, Math.min(left, room - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${y + size + 8}px`;
  }

  // A shared block's holders take turns; behind the last one nobody is pinned.
  pin(id) {
    const holders = id === null ? [] : holdersOf(this.pool, id).map(([request]) => this.pool.requests[request].id);
    this.pinned = holders[holders.indexOf(this.pinned) + 1] ?? null;
    this.draw();
  }

  key(event) {
    const { columns } = this.place;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    if (event.key in steps) {
      const next = this.at === null ? 1 : this.at + steps[event.key];
      if (next >= 1 && next <= this.pool.num_blocks) this.point(next);
    } else if (event.key === "Enter" && this.at !== null) {
      this.pin(this.at);
    } else if (event.key === "Escape") {
      this.pin(null);
    } else {
      return;
    }
    event.preventDefault();
  }
}
