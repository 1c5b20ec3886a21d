// V3: one row by hand. The only numbers that a reader can change.
const SEED = { s: [1, 3, 2, 5], v: [[10], [20], [30], [40]], length: 2, name: () => said("v3.seed") };
let hand = { ...SEED };
const EDITABLE = 64;

function traced() {
  const { row } = state, head = current().head || 0, key = Math.floor(head / (run().problem.h / run().problem.g)), length = run().problem.block_n;
  const v = [];
  for (let j = 0; j < run().problem.s; j++) v.push([run().v.at(key, j, 0)]);
  return { s: [...run().S.row(head, row)], v, length, name: () => said("v3.row", { row, length }) };
}

/** "−inf", "1e3", "−2" → number; what is no number counts as 0. */
function parse(text) {
  const plain = text.trim().toLowerCase().replace("−", "-");
  if (/^-?(inf|infinity|∞)$/.test(plain)) return plain.startsWith("-") ? -Infinity : Infinity;
  const x = Number(plain);
  return Number.isFinite(x) ? x : 0;
}

function layCells() {
  const few = hand.s.length <= EDITABLE;
  $("cells").innerHTML = hand.s
    .map((x, t) => (few
      ? `<input type="text" inputmode="decimal" class="cell" id="row-cell-${t + 1}" data-testid="row-cell-${t + 1}" aria-label="${said("v3.cell", { index: t + 1 })}" value="${short(x)}">`
      : `<span class="cell">${short(x)}</span>`))
    .join("");
  $("cut").max = hand.s.length;
  $("cut").value = hand.length;
}
function setRow(next) {
  hand = next;
  layCells();
  drawRow();
}

function drawRow() {
  const { s, v, length } = hand, states = fold(s, v, length), last = states.at(-1), [once] = fold(s, v, s.length);
  const { lse, o } = finish(last), p = s.map((x) => (x === -Infinity ? 0 : Math.exp(x - lse)));
  all(".cell").forEach((cell, t) => {
    cell.classList.toggle("starts", t > 0 && t % length === 0);
    cell.classList.toggle("odd", Math.floor(t / length) % 2 === 1);
  });
  $("cut-value").textContent = length;
  $("row-name").textContent = hand.name();
  $("folding").innerHTML = states
    .map((now, t) => {
      const old = t ? states[t - 1].l : 0, added = now.p.reduce((a, b) => a + b, 0), id = (name) => `data-testid="row-${name}-${t + 1}"`;
      const cells = s.slice(t * length, (t + 1) * length), shown = cells.length > 4 ? `${short(cells[0], 2)} … ${short(cells.at(-1), 2)}` : cells.map((x) => short(x, 2)).join(", ");
      return `<tr><th scope="row">${shown}</th><td class="m" ${id("m")}>${short(now.m)}</td><td ${id("alpha")}>${t ? number(now.alpha) : short(now.alpha)}</td><td>${number(now.alpha * old)}</td><td>${number(added)}</td><td class="m" ${id("l")}>${number(now.l)}</td></tr>`;
    })
    .join("");
  $("row-l-final").textContent = number(last.l);
  $("row-l-once").textContent = number(once.l);
  $("row-lse").textContent = number(lse);
  $("row-p").textContent = p.map((x) => number(x)).join(" ");
  $("row-o").textContent = short(o[0]);
  const naive = s.reduce((sum, x) => sum + Math.exp(x), 0);
  $("row-naive").textContent = Number.isFinite(naive) ? number(naive) : said("v3.overflow");
  $("row-verdict").textContent = last.l === once.l || number(last.l, 12) === number(once.l, 12) ? said("v3.equal") : said("v3.unequal", { by: Math.abs(last.l - once.l).toExponential(1) });
  drawBars(s, length, states);
  drawMerge();
}

function drawBars(s, length, states) {
  const seen = s.filter((x) => x !== -Infinity), high = Math.max(...seen, 0), low = Math.min(...seen, 0), wide = 460 / s.length;
  const unit = seen.length ? 200 / (high - low || 1) : 0, floor = 235 + low * unit, y = (x) => floor - x * unit, gap = Math.min(8, wide / 8);
  const bars = s.map((x, t) => {
    const block = `b${Math.floor(t / length) % 2}`, left = t * wide + gap, w = wide - 2 * gap;
    if (x === -Infinity) return `<rect class="logit hidden" x="${left}" y="35" width="${w}" height="200"/>`;
    const text = s.length <= 12 ? `<text class="digit" x="${left + w / 2}" y="${(x < 0 ? floor : y(x)) - 6}" text-anchor="middle">${short(x, 2)}</text>` : "";
    return `<rect class="logit ${block}" x="${left}" y="${Math.min(y(x), floor)}" width="${w}" height="${Math.max(Math.abs(x) * unit, 1)}"/>${text}`;
  });
  const lines = states.map((now, t) => {
    if (now.m === -Infinity) return "";
    const left = t * length * wide + 2, right = Math.min((t + 1) * length, s.length) * wide - 2;
    const text = states.length <= 4 ? `<text class="m" x="${left + 4}" y="${y(now.m) - 6}">m = ${short(now.m, 2)}</text>` : "";
    return `<path class="max" d="M${left} ${y(now.m)}H${right}"/>${text}`;
  });
  $("row-picture").innerHTML = bars.join("") + lines.join("");
  drawSums(states, length);
}

/** ℓ after each block as a bar: what the new max leaves of the old sum, then what each key adds. */
function drawSums(states, length) {
  const shown = states.slice(0, 6), wide = 330 / Math.max(...shown.map((now) => now.l), 1e-9);
  const rows = shown.map((now, t) => {
    const old = t ? now.alpha * states[t - 1].l : 0, y = t * 30, parts = [[old, "kept"], ...now.p.map((p) => [p, `b${t % 2}`])];
    let x = 0;
    const bars = parts.map(([size, tone]) => {
      const bar = size > 0 ? `<rect class="${tone === "kept" ? "kept" : `logit ${tone}`}" x="${x}" y="${y}" width="${size * wide}" height="22"/>` : "";
      x += size * wide;
      return bar;
    });
    return `${bars.join("")}<text class="digit" x="${x + 8}" y="${y + 16}">ℓ = ${number(now.l)}</text>`;
  });
  $("row-sums").setAttribute("viewBox", `0 0 460 ${30 * shown.length}`);
  $("row-sums").innerHTML = rows.join("");
}

$("cells").addEventListener("input", () => {
  hand = { ...hand, s: all("#cells input").map((cell) => parse(cell.value)) };
  drawRow();
});
$("cut").addEventListener("input", (e) => {
  hand = { ...hand, length: Number(e.target.value) };
  drawRow();
});
$("row-seed").onclick = () => setRow({ ...SEED });
$("row-trace").onclick = () => setRow(traced());
$("row-big").onclick = () => setRow({ ...hand, s: hand.s.map((x) => x + 1000) });
$("row-hidden").onclick = () => setRow({ ...hand, s: hand.s.map(() => -Infinity) });

views.push(function byHand(now, before) {
  if (before.run === null) return setRow({ ...SEED });
  if (moved(before, "row") && !moved(before, "step")) return setRow(traced());
  if (moved(before, "lang")) setRow(hand);
});
