// One cursor for every view, kept in the address: a link shows exactly this.
const DEFAULT = { run: DATA.main, order: "flash2", pass: "fwd", step: 0, row: 0, lang: document.documentElement.lang.slice(0, 2), theme: "auto" };
let state = { ...DEFAULT };
const views = [];
const said = (key, slots = {}) => DATA.words[state.lang][key].replace(/\{(\w+)\}/g, (_, name) => slots[name]);

const run = () => RUNS[state.run];
const steps = () => run().steps(state);
const current = () => steps()[state.step];

function read(hash) {
  const given = Object.fromEntries(new URLSearchParams(hash.slice(1)));
  const next = { ...state };
  for (const name of ["run", "order", "pass", "lang", "theme"]) if (name in given) next[name] = given[name];
  for (const name of ["step", "row"]) if (/^\d+$/.test(given[name] || "")) next[name] = Number(given[name]);
  next.followed = "row" in given;
  return [next, given.view];
}

/** The nearest state that exists. */
function settle(next) {
  if (!(next.run in RUNS)) next.run = DEFAULT.run;
  const there = RUNS[next.run];
  if (!there.orders[next.order]) next.order = "flash2";
  if (!there.steps(next).length) next.pass = "fwd";
  if (!(next.lang in DATA.words)) next.lang = DEFAULT.lang;
  if (!["auto", "light", "dark"].includes(next.theme)) next.theme = "auto";
  next.step = Math.max(0, Math.min(next.step, there.steps(next).length - 1));
  const here = there.steps(next)[next.step];
  if (next.followed === false && here.i !== undefined) next.row = here.i * there.problem.block_m; // a link that names no row
  delete next.followed;
  next.row = Math.max(0, Math.min(next.row, there.problem.n - 1));
  return next;
}

function address() {
  const { run, order, pass, step, row, lang, theme } = state;
  return "#" + new URLSearchParams({ run, order, pass, step, row, lang, theme });
}

/** Change the state, redraw, and write the address. `jump`: Back undoes it. */
function go(change, jump = false) {
  const before = state;
  state = settle({ ...state, ...change });
  for (const view of views) view(state, before);
  const url = address();
  if (url !== location.hash) history[jump ? "pushState" : "replaceState"](null, "", url);
}

const moved = (before, ...names) => names.some((name) => before[name] !== state[name]);
