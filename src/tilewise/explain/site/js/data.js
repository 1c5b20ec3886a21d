// What the page knows: the traces, decoded once. Nothing is fetched.
const DATA = JSON.parse(document.getElementById("trace").textContent);
const $ = (id) => document.getElementById(id);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

/** float16, little endian, in base64 → Float32Array */
function half(text) {
  const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const bits = new Uint16Array(raw.buffer);
  const out = new Float32Array(bits.length);
  for (let x = 0; x < bits.length; x++) {
    const h = bits[x], e = (h >> 10) & 31, f = h & 1023;
    const size = e === 0 ? f * 2 ** -24 : e === 31 ? (f ? NaN : Infinity) : (1 + f / 1024) * 2 ** (e - 15);
    out[x] = h & 0x8000 ? -size : size;
  }
  return out;
}

/** A matrix over heads: at(head, row, col). */
class Matrix {
  constructor(array, run) {
    [this.heads, this.rows, this.cols] = array.shape;
    const given = half(DATA.arrays[array.data]);
    this.x = "hidden" in array ? this.put(given, less(array.hidden), run) : given;
  }
  /** A whole matrix from its visited tiles. */
  put(given, hidden, run) {
    const x = new Float32Array(this.heads * this.rows * this.cols).fill(hidden);
    let from = 0;
    for (let h = 0; h < this.heads; h++) {
      run.tiles.forEach((line, i) => [...line].forEach((kind, j) => {
        if (kind === "E") return;
        const [first, rows] = run.queries(i), [left, cols] = run.keys(j);
        for (let r = first; r < first + rows; r++, from += cols) x.set(given.subarray(from, from + cols), (h * this.rows + r) * this.cols + left);
      }));
    }
    return x;
  }
  row(h, i) {
    const from = (h * this.rows + i) * this.cols;
    return this.x.subarray(from, from + this.cols);
  }
  at(h, i, j) {
    return this.x[(h * this.rows + i) * this.cols + j];
  }
}

const less = (x) => (x === null ? -Infinity : x); // JSON has no −∞

class Run {
  constructor(raw) {
    Object.assign(this, raw);
    this.found = {};
    this.has = (name) => name in raw.arrays;
    for (const [name, array] of Object.entries(raw.arrays)) {
      Object.defineProperty(this, name, { get: () => (this.found[name] ||= new Matrix(array, this)) });
    }
    for (const order of Object.values(raw.orders)) {
      for (const list of Object.values(order)) {
        let part;
        list.forEach((step, t) => {
          part = step.part || part;
          list[t] = { load: {}, store: {}, flops: 0, exps: 0, ...(step.name ? {} : { head: 0 }), ...step, part };
        });
      }
    }
    this.cols = Math.ceil(this.problem.s / this.problem.block_n);
    this.rows = Math.ceil(this.problem.n / this.problem.block_m);
  }
  steps(state) {
    return this.orders[state.order]?.[state.pass] || [];
  }
  kind(step) {
    return step.i === undefined ? "" : { E: "EMPTY", P: "PARTIAL", F: "FULL" }[this.tiles[step.i][step.j]];
  }
  /** first row, rows: of block i of the queries; likewise of the keys. */
  queries(i) {
    const b = this.problem.block_m;
    return [i * b, Math.min(b, this.problem.n - i * b)];
  }
  keys(j) {
    const b = this.problem.block_n;
    return [j * b, Math.min(b, this.problem.s - j * b)];
  }
  /** m, ℓ and α of the rows of a visited tile. */
  after(step) {
    return this.states[step.head]?.[step.i]?.[step.j];
  }
}

const RUNS = Object.fromEntries(DATA.runs.map((raw) => [raw.name, new Run(raw)]));
