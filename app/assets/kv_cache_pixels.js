// Cells of a few pixels, painted pixel by pixel: a pool of 100,000 blocks would take as many rectangles.
// Put between kv_cache_pool.js and kv_cache.js.

const DIMMED = 0.16; // opacity of what is not pinned
const EMPTY = 0.28; // opacity of what holds no token yet

class CellPainter {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d");
    const probe = document.createElement("canvas");
    probe.width = probe.height = 1;
    this.probe = probe.getContext("2d", { willReadFrequently: true });
    this.words = new Map();
  }

  // The map of the pool on a canvas of its own, without the gutter. `bright`: by block, 0 for a dimmed one.
  paint(pool, look, bright) {
    const { size, columns, rows } = look;
    const width = columns * size;
    if (this.canvas.width !== width || this.canvas.height !== rows * size || !this.image) {
      this.canvas.width = width;
      this.canvas.height = rows * size;
      this.image = new ImageData(width, rows * size);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    const { pixels } = this;
    pixels.fill(0);
    const side = size >= 5 ? size - 1 : size;
    const dot = size < 4 ? size : size - 2; // of what has no holder: a texture, where there is room for one
    const of = (colour, opacity) => [this.word(colour, opacity * DIMMED), this.word(colour, opacity)];
    const free = of(look.line, 1);
    const evictable = of(pool.evictable, 1);
    const shared = of(look.text, 1);
    const filled = pool.requests.map(({ colour }) => of(colour, 1));
    const empty = pool.requests.map(({ colour }) => of(colour, EMPTY));
    const fill = (at, side, from, to, word) => {
      for (let y = from; y < to; y++) pixels.fill(word, at + y * width, at + y * width + side);
    };
    for (let id = 1; id <= pool.num_blocks; id++) {
      const row = Math.floor((id - 1) / columns);
      const at = row * size * width + (id - 1 - row * columns) * size;
      const count = pool.refCounts[id];
      if (count > 1) {
        fill(at, side, 0, side, shared[bright[id]]);
      } else if (count) {
        const { request } = pool.lists[pool.firstList[id]];
        const tokens = tokensIn(pool, request, pool.firstPlace[id]) ?? pool.block_size;
        const without = Math.round(side * (1 - tokens / pool.block_size));
        if (without) fill(at, side, 0, without, empty[request][bright[id]]);
        fill(at, side, without, side, filled[request][bright[id]]);
      } else if (pool.cached[id]) {
        fill(at, dot, 0, dot, evictable[bright[id]]);
      } else {
        fill(at, side, 0, side, free[bright[id]]);
      }
    }
    this.context.putImageData(this.image, 0, 0);
    return this.canvas;
  }

  // A pixel of this colour, as the machine orders its bytes.
  word(colour, opacity) {
    const key = `${colour} ${opacity}`;
    if (!this.words.has(key)) {
      this.probe.clearRect(0, 0, 1, 1);
      this.probe.fillStyle = colour;
      this.probe.fillRect(0, 0, 1, 1);
      const bytes = this.probe.getImageData(0, 0, 1, 1).data;
      bytes[3] = Math.round(bytes[3] * opacity);
      this.words.set(key, new Uint32Array(bytes.buffer)[0]);
    }
    return this.words.get(key);
  }
}
