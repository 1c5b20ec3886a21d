// The page's own arithmetic: one softmax row, and how numbers look. Python's `softmax.absorb` is the model; tests compare them.
const pivot = (m) => (m === -Infinity ? 0 : m);

/** The state {m, l, acc} of one row after logits `s` and value rows `v` (each an array of e numbers, or null). */
function absorb(state, s, v) {
  const m = Math.max(state.m, ...s);
  const alpha = Math.exp(state.m - pivot(m));
  const p = s.map((x) => Math.exp(x - pivot(m)));
  const acc = state.acc.map((a, c) => p.reduce((sum, w, t) => sum + (w === 0 ? 0 : w * v[t][c]), alpha * a));
  return { m, l: p.reduce((sum, w) => sum + w, alpha * state.l), acc, alpha, p };
}
const empty = (e) => ({ m: -Infinity, l: 0, acc: new Array(e).fill(0) });

/** lse = m + log ℓ, o = acc / ℓ; nothing seen gives −∞ and 0. */
function finish(state) {
  const nothing = state.l === 0;
  return { lse: nothing ? -Infinity : state.m + Math.log(state.l), o: state.acc.map((a) => (nothing ? 0 : a / state.l)) };
}

/** All states of a row cut into blocks of `length`. */
function fold(row, values, length) {
  const states = [];
  let state = empty(values[0]?.length || 0);
  for (let from = 0; from < row.length; from += length) {
    state = absorb(state, row.slice(from, from + length), values.slice(from, from + length));
    states.push(state);
  }
  return states;
}

const group = (x) => String(x).replace(/\B(?=(\d{3})+$)/g, ",");
const bytes = (x) => `${group(Math.round(x))} B`;
const minus = (text) => text.replace(/^-/, "−");
function number(x, digits = 3) {
  if (x === Infinity || x === -Infinity) return x > 0 ? "∞" : "−∞";
  return Number.isNaN(x) ? "NaN" : minus(x.toFixed(digits).replace(/^-(0\.?0*)$/, "$1"));
}
/** Whole numbers without digits after the point. */
const short = (x, digits = 3) => (Number.isInteger(x) ? minus(String(x)) : number(x, digits));
