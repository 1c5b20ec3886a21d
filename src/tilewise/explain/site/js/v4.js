// V4: the tile under the cursor, pair by pair.
const SHADES = 20, CELL = [46, 28];
/** The cells of each map, kept from tile to tile: making them anew would take longer than all else. */
const CELLS = new Map();

function cells(svg, rows, cols) {
  const size = `${rows}×${cols}`, kept = CELLS.get(svg);
  if (kept?.size === size) return kept.list;
  const [w, h] = CELL, list = [];
  wipe(svg);
  svg.setAttribute("viewBox", `0 0 ${cols * w} ${rows * h}`);
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < cols; c++) {
      const text = rows * cols <= 1024 ? `<text class="cell-number" x="${(c + 0.5) * w}" y="${(r + 0.66) * h}" text-anchor="middle"></text>` : "";
      list.push(`<rect class="cellbox" data-r="${r}" data-c="${c}" x="${c * w}" y="${r * h}" width="${w}" height="${h}"/>${text}`);
    }
  }
  svg.insertAdjacentHTML("beforeend", list.join("") + `<path class="row-frame" d=""/>`);
  const boxes = all(".cellbox", svg), made = { size, list: boxes.map((box) => [box, box.nextElementSibling?.matches("text") ? box.nextElementSibling : null]) };
  CELLS.set(svg, made);
  return made.list;
}
function wipe(svg) {
  CELLS.delete(svg);
  svg.querySelectorAll(":scope > :not(defs)").forEach((element) => element.remove());
}

/** A heat map: `value(r, c)` is null where hidden, `marked(r, c)` outlines, `size` is what a shade stands for. */
function heat(svg, rows, cols, value, marked = () => false, size = (x) => x) {
  let low = Infinity, high = -Infinity;
  const values = cells(svg, rows, cols).map((_, at) => {
    const x = value(Math.floor(at / cols), at % cols);
    if (x !== null) (low = Math.min(low, size(x))), (high = Math.max(high, size(x)));
    return x;
  });
  cells(svg, rows, cols).forEach(([box, text], at) => {
    const x = values[at], share = x === null ? 0 : (size(x) - low) / (high - low || 1);
    box.setAttribute("class", x === null ? "cellbox hidden" : `cellbox s${Math.round(SHADES * share)}${marked(Math.floor(at / cols), at % cols) ? " top" : ""}`);
    if (text) text.textContent = x === null ? "" : number(x, 2);
  });
}

/** Scores of the cursor's tile: s(r, c), null where hidden; undefined where there is no such tile. */
function tileScores(step = current()) {
  if (step.i === undefined || run().kind(step) === "EMPTY") return;
  const [i, rows] = run().queries(step.i), [j, cols] = run().keys(step.j), head = step.head || 0;
  const s = (r, c) => {
    const x = run().S.at(head, i + r, j + c);
    return x === -Infinity ? null : x;
  };
  return { i, j, rows, cols, s, head, step };
}

views.push(function inside(now, before) {
  if (!moved(before, "run", "step", "order", "pass", "row", "lang")) return;
  const step = current(), tile = tileScores();
  $("probe").textContent = said("v4.hint");
  if (!tile) {
    $("tile-name").textContent = step.i === undefined ? step.name : said("v4.none", { i: step.i, j: step.j });
    for (const name of ["S", "P"]) wipe($(`heat-${name}`));
    $("update").innerHTML = "";
    return;
  }
  const { i, j, rows, cols, s } = tile, kept = run().after(step);
  $("tile-name").textContent = said("v4.tile", { i: step.i, j: step.j, kind: run().kind(step), rows, cols });
  const top = Array.from({ length: rows }, (_, r) => Math.max(...Array.from({ length: cols }, (_, c) => s(r, c) ?? -Infinity)));
  heat($("heat-S"), rows, cols, s, (r, c) => s(r, c) === top[r]);
  heat($("heat-P"), rows, cols, (r, c) => (s(r, c) === null ? null : Math.exp(s(r, c) - pivot(less(kept.m[r])))));
  const at = now.row - i;
  const line = at >= 0 && at < rows ? `M0 ${at * CELL[1]}h${cols * CELL[0]}m0 ${CELL[1]}H0` : "";
  for (const name of ["S", "P"]) $(`heat-${name}`).querySelector(".row-frame").setAttribute("d", line);
  $("update").innerHTML = at >= 0 && at < rows && forward() ? update(tile, at, kept) : "";
});

/** The row's acc before and after the tile, first columns. */
function update(tile, r, kept) {
  const { step, head, i } = tile, [s, v] = seenSoFar(i + r, step), count = run().keys(step.j)[1], e = run().problem.e;
  const before = absorb(empty(e), s.slice(0, s.length - count), v.slice(0, v.length - count)), after = absorb(before, s.slice(-count), v.slice(-count));
  const shown = Math.min(e, 6), cells = (list) => list.slice(0, shown).map((x) => `<td>${number(x, 3)}</td>`).join("");
  const scaled = before.acc.map((x) => x * after.alpha), added = after.acc.map((x, c) => x - scaled[c]);
  return [["v4.before", before.acc], ["v4.scaled", scaled], ["v4.added", added], ["v4.after", after.acc], ["v4.output", finish(after).o]]
    .map(([key, list]) => `<tr><th scope="row">${said(key, { alpha: number(kept.alpha[r]) })}</th>${cells(list)}</tr>`)
    .join("");
}

/** One pair's dot product, said in full. */
function probe(r, c) {
  const tile = tileScores();
  if (!tile || r < 0 || c < 0 || r >= tile.rows || c >= tile.cols) return;
  const { i, j, head } = tile, value = tile.s(r, c), key = Math.floor(head / (run().problem.h / run().problem.g));
  for (const box of all("#v4 .cellbox")) box.classList.toggle("probed", Number(box.dataset.r) === r && Number(box.dataset.c) === c);
  if (value === null) return ($("probe").textContent = said("v4.masked", { i: i + r, j: j + c }));
  const q = run().q.row(head, i + r), k = run().k.row(key, j + c);
  const terms = [...q].slice(0, 8).map((x, t) => `${number(x, 2)}·${k[t] < 0 ? `(${number(k[t], 2)})` : number(k[t], 2)}`).join(" + ") + (q.length > 8 ? " + …" : "");
  $("probe").textContent = said("v4.probe", { i: i + r, j: j + c, value: number(value), root: number(1 / run().problem.scale, 2), terms });
}
let probed = [0, 0];
for (const name of ["S", "P"]) {
  const svg = $(`heat-${name}`);
  svg.tabIndex = 0;
  svg.addEventListener("pointermove", (e) => {
    const box = e.target.closest(".cellbox");
    if (box) probe(...(probed = [Number(box.dataset.r), Number(box.dataset.c)]));
  });
  svg.addEventListener("focus", () => probe(...probed));
  svg.addEventListener("keydown", (e) => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[e.key], tile = tileScores();
    if (!by || !tile || e.shiftKey) return;
    probed = [Math.min(Math.max(probed[0] + by[0], 0), tile.rows - 1), Math.min(Math.max(probed[1] + by[1], 0), tile.cols - 1)];
    probe(...probed);
    e.preventDefault();
    e.stopPropagation();
  });
}
$("numbers").onchange = (e) => document.body.classList.toggle("no-numbers", !e.target.checked);
