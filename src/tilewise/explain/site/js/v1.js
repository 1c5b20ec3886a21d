// V1: the two loops, and the row that is followed.
const picture = () => document.querySelector(`.loops[data-run="${CSS.escape(state.run)}"]`);

/** What a run's picture is made of, found once. */
const PARTS = new Map();
function parts() {
  if (!PARTS.has(state.run)) {
    const root = picture();
    const tiles = Array.from({ length: run().rows }, () => []);
    for (const tile of all(".tile", root)) {
      const { i, j } = tile.dataset;
      tiles[i][j] = tile;
      tile.setAttribute("aria-label", `(${i}, ${j}) ${run().kind({ i, j })}`);
    }
    const blocks = (name) => all(`.block.${name}`, root);
    PARTS.set(state.run, { root, tiles, q: blocks("q"), o: blocks("o"), k: blocks("k"), v: blocks("v"), row: root.querySelector(".cursor-row") });
  }
  return PARTS.get(state.run);
}

/** The row's state after the cursor's step: {m, l, alpha, o}, nothing seen before its first tile. */
function rowState(row) {
  const step = lastVisit(row);
  if (!step) return null;
  const [first] = run().queries(step.i), kept = run().after(step), x = row - first;
  return { step, m: less(kept.m[x]), l: kept.l[x], alpha: kept.alpha[x] };
}

/** Logits of a row up to and including the tiles visited so far, and their values, in plain arrays. */
function seenSoFar(row, upto) {
  const s = [], v = [], head = upto.head, key = Math.floor(head / (run().problem.h / run().problem.g));
  for (const step of steps().slice(0, state.step + 1)) {
    if (step.i !== upto.i || step.head !== head || run().kind(step) === "EMPTY") continue;
    const [from, count] = run().keys(step.j);
    for (let j = from; j < from + count; j++) s.push(run().S.at(head, row, j)), v.push([...run().v.row(key, j)]);
  }
  return [s, v];
}

const forward = () => ["forward", "forward1"].includes(current().part);

views.push(function loops(now, before) {
  const { tiles, q, o, k, v, row } = parts(), step = current(), sum = counted();
  const done = new Set(steps().slice(0, now.step).filter((s) => s.i !== undefined && s.part === step.part && s.head === step.head).map((s) => `${s.i},${s.j}`));
  for (const line of tiles) {
    for (const tile of line) {
      const { i, j } = tile.dataset, here = Number(i) === step.i && Number(j) === step.j;
      tile.classList.toggle("now", here);
      tile.classList.toggle("done", !here && done.has(`${i},${j}`));
      tile.tabIndex = here || (step.i === undefined && i === "0" && j === "0") ? 0 : -1;
    }
  }
  document.body.classList.toggle("keys-outside", OUTER[step.part] === "j");
  const busy = step.i !== undefined && run().kind(step) !== "EMPTY";
  const mark = (blocks, index) => blocks.forEach((b, x) => b.classList.toggle("now", busy && x === index));
  mark(q, step.i), mark(k, step.j), mark(v, step.j), mark(o, step.i);
  const written = new Set(steps().slice(0, now.step + 1).filter((s) => s.head === step.head && (s.store.o || s.store.dq)).map((s) => s.i));
  o.forEach((b, x) => b.classList.toggle("done", now.order === "standard" ? Boolean(sum.store.o) : written.has(x)));
  const b = run().problem.block_m, at = Math.floor(now.row / b), [x, top, wide, high] = ["x", "y", "width", "height"].map((name) => Number(q[at].getAttribute(name)));
  const y = top + ((now.row % b) + 0.5) * (high / run().queries(at)[1]);
  row.setAttribute("d", `M${x - 6} ${y}H${x + wide + 6}M${o[0].getAttribute("x") - 6} ${y}h12`);
  panel(step);
});

function panel(step) {
  const p = run().problem, tiled = step.i !== undefined;
  const [rows, cols] = tiled ? [run().queries(step.i)[1], run().keys(step.j)[1]] : ["–", "–"];
  $("now-tile").textContent = tiled ? `(${step.i}, ${step.j}) ${run().kind(step)}` : step.name;
  const shape = (a, b) => (tiled ? `${a} × ${b}` : "–");
  $("shape-q").textContent = shape(rows, p.d);
  $("shape-k").textContent = `${shape(cols, p.d)}, ${shape(cols, p.e)}`;
  $("shape-s").textContent = shape(rows, cols);
  $("shape-o").textContent = shape(rows, p.e);
  $("shape-m").textContent = tiled ? `${rows}, ${rows}` : "–";
  $("row").textContent = state.row;
  const kept = forward() ? rowState(state.row) : null;
  $("now-m").textContent = kept ? number(kept.m) : "−∞";
  $("now-alpha").textContent = kept ? number(kept.alpha) : "–";
  $("now-l").textContent = kept ? number(kept.l) : "0";
  $("now-o").textContent = kept ? output(state.row, kept.step).slice(0, 3).map((x) => number(x, 2)).join(" ") : "0";
}

/** acc / ℓ of a row over what it has seen. */
function output(row, step) {
  const [s, v] = seenSoFar(row, step);
  return finish(absorb(empty(run().problem.e), s, v)).o;
}

document.addEventListener("click", (e) => {
  const cell = e.target.closest(".tile");
  if (cell) tile(Number(cell.dataset.i), Number(cell.dataset.j));
});

/** Arrows move inside a grid, Enter jumps to the tile. */
document.addEventListener("keydown", (e) => {
  const cell = e.target.closest?.(".tile");
  if (!cell) return;
  const [i, j] = [Number(cell.dataset.i), Number(cell.dataset.j)];
  if (e.key === "Enter") tile(i, j);
  else {
    const to = { ArrowUp: [i - 1, j], ArrowDown: [i + 1, j], ArrowLeft: [i, j - 1], ArrowRight: [i, j + 1] }[e.key];
    if (!to || e.shiftKey) return;
    const next = parts().tiles[to[0]]?.[to[1]];
    if (next) {
      cell.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
  }
  e.preventDefault();
}, true);

{
  let from = null;
  document.addEventListener("pointerdown", (e) => (from = e.target.closest(".loops") && e.pointerType === "touch" ? e.clientX : null));
  document.addEventListener("pointerup", (e) => {
    if (from !== null && Math.abs(e.clientX - from) > 40) step(e.clientX < from ? 1 : -1);
    from = null;
  });
}
