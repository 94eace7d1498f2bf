// The pool as the block map draws it. Put before kv_cache.js: a component has one script.
//
// Data (kv_cache_map.py): u32 size of a JSON header, the header, then u32 block ids: those of the header's `lists`, one list
// behind the other, and those that are cached.

const MAX_HOLDERS = 8; // named in a tip

function parse(bytes) {
  const words = new Uint32Array(bytes.slice().buffer);
  const headerWords = words[0] / 4;
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(words.buffer, 4, words[0])));
  const pool = { ...header, ids: words.subarray(1 + headerWords), lists: [] };
  pool.refCounts = new Uint32Array(header.num_blocks + 1);
  pool.firstList = new Int32Array(header.num_blocks + 1).fill(-1);
  pool.firstPlace = new Uint32Array(header.num_blocks + 1);
  pool.cached = new Uint8Array(header.num_blocks + 1);
  let offset = 0;
  for (const [request, group, length] of header.lists) {
    const index = pool.lists.push({ request, group, blocks: pool.ids.subarray(offset, offset + length) }) - 1;
    for (let place = 0; place < length; place++) {
      const id = pool.ids[offset + place];
      if (!pool.refCounts[id]++) {
        pool.firstList[id] = index;
        pool.firstPlace[id] = place;
      }
    }
    offset += length;
  }
  for (const id of pool.ids.subarray(offset)) pool.cached[id] = 1;
  pool.counts = { held: 0, shared: 0, evictable: 0, free: 0 };
  for (let id = 1; id <= header.num_blocks; id++) pool.counts[stateOf(pool, id)]++;
  return pool;
}

function stateOf(pool, id) {
  if (pool.refCounts[id]) return pool.refCounts[id] > 1 ? "shared" : "held";
  return pool.cached[id] ? "evictable" : "free";
}

// Tokens in a request's block at `place`; null where the ledger does not tell.
function tokensIn(pool, request, place) {
  const tokens = pool.requests[request].tokens;
  if (tokens === null) return null;
  return Math.min(pool.block_size, Math.max(0, tokens - place * pool.block_size));
}

// [request, place, group] of every holder.
function holdersOf(pool, id) {
  const holders = [];
  for (const { request, group, blocks } of pool.lists) {
    const place = blocks.indexOf(id);
    if (place >= 0) holders.push([request, place, group]);
  }
  return holders;
}

const number = (value) => value.toLocaleString("en-US");

// What the tokens in a block say; null where nobody has asked.
function textOf(pool, id) {
  if (!pool.texts || !pool.refCounts[id]) return null;
  return pool.texts.lines[id] ?? pool.texts.note;
}

function describe(pool, id) {
  const lines = [`Block ${number(id)}`];
  const holders = pool.refCounts[id] ? holdersOf(pool, id) : [];
  for (const [request, place, group] of holders.slice(0, MAX_HOLDERS)) {
    const first = place * pool.block_size;
    const filled = tokensIn(pool, request, place);
    let what = `tokens ${number(first)} to ${number(first + pool.block_size - 1)}`;
    if (filled === 0) what += ", none of them yet";
    else if (filled !== null && filled < pool.block_size) what += `, ${filled} of ${pool.block_size} so far`;
    lines.push(`Request ${pool.requests[request].name}: ${what}` + (group ? ` (KV group ${group})` : ""));
  }
  if (holders.length > MAX_HOLDERS) lines.push(`and ${number(holders.length - MAX_HOLDERS)} more requests`);
  const cached = pool.cached[id] ? "can be found in the cache" : "not in the cache";
  if (holders.length) lines.push(`Reference count ${number(holders.length)}, ${cached}`);
  else lines.push(pool.cached[id] ? "Evictable: cached, no holder" : "Free");
  return lines.join("\n");
}
