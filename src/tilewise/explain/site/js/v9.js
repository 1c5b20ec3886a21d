// V9: block sizes. Python's `cost.blocks` is the model; tests compare them.
const paperBlocks = (elements, d) => {
  const cols = Math.max(1, Math.ceil(elements / (4 * d)));
  return [Math.min(cols, d), cols];
};
const footprint = ([r, c], d, e) => ({ q: r * d, k: c * d, v: c * e, o: r * e, s: r * c, "m, l": 2 * r });
const taken = (shape, d) => Object.values(footprint(shape, d, d)).reduce((a, b) => a + b);
function leastTraffic(elements, d, n, step = 16) {
  for (let r = Math.ceil(n / step) * step; r > 0; r -= step) if (taken([r, step], d) <= elements) return [r, step];
  return null;
}
/** Bytes of one head without a mask, forward, in numbers of z bytes: query blocks outside, key blocks outside, stored. */
function walkBytes(order, [r, c], n, d, z) {
  const rows = Math.ceil(n / r), cols = Math.ceil(n / c), y = Math.max(4, z);
  if (order === "flash2") return z * (2 * n * d + rows * 2 * n * d) + y * n;
  if (order === "flash1") return z * (2 * n * d + cols * n * d + (2 * cols - 1) * n * d) + y * n * (2 * cols - 1);
  return z * (4 * n * n + 4 * n * d);
}

const CURVE = 8192;
function drawBlocks() {
  const kilobytes = Number($("memory").value), d = Number(chosen("headsize")), z = Number(chosen("width"));
  const elements = Math.floor((kilobytes * 1024) / z), shape = paperBlocks(elements, d), best = leastTraffic(elements, d, CURVE);
  $("kilobytes").textContent = kilobytes;
  $("br").textContent = shape[0];
  $("bc").textContent = shape[1];
  let at = 0;
  $("fits").innerHTML = Object.entries(footprint(shape, d, d))
    .map(([name, size]) => {
      const from = (280 * at) / elements, wide = (280 * size) / elements;
      at += size;
      return `<rect class="part p-${name[0]}" x="${from}" y="22" width="${wide}" height="30"/>` + (wide > 10 ? `<text x="${from + wide / 2}" y="68" text-anchor="middle">${SIGNS[name] || "m ℓ"}</text>` : "");
    })
    .join("");
  $("footprint").textContent = `${Math.round((100 * at) / elements)}%`;
  $("too-big").hidden = at <= elements;
  $("ratio-dm").textContent = ((d * d) / elements).toFixed(2);
  $("best-blocks").textContent = best ? best.join(" × ") : "–";
  const rows = [["standard", null], ["flash1", shape], ["flash2", shape], ...(best ? [["flash2", best]] : [])];
  $("traffic").innerHTML = rows
    .map(([order, blocks], t) => `<tr><th scope="row">${said(`v9.${t === 3 ? "best" : order}`)}</th><td>${blocks ? blocks.join(" × ") : "–"}</td><td>${(walkBytes(order, blocks || [1, 1], CURVE, d, z) / 1e6).toFixed(1)}</td></tr>`)
    .join("");
  drawCurve(shape, best, d, z);
}
const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;

function drawCurve(shape, best, d, z) {
  const sizes = Array.from({ length: 61 }, (_, t) => 16 * 2 ** (t / 10)).filter((b) => b <= 1024);
  const bytesOf = (order, b) => walkBytes(order, [b, b], CURVE, d, z), stored = walkBytes("standard", [1, 1], CURVE, d, z), least = z * 4 * CURVE * d;
  const high = Math.max(bytesOf("flash1", 16), stored) * 1.3, low = least * 0.8;
  const x = (b) => (420 * Math.log2(b / 16)) / 6, y = (v) => (170 * Math.log(high / v)) / Math.log(high / low);
  const line = (order) => sizes.map((b, t) => `${t ? "L" : "M"}${x(b).toFixed(1)} ${y(bytesOf(order, b)).toFixed(1)}`).join("");
  const ticks = [16, 32, 64, 128, 256, 512, 1024].map((b) => `<path class="grid" d="M${x(b)} 0V170"/><text class="quiet" x="${x(b)}" y="188" text-anchor="middle">${b}</text>`).join("");
  const level = (v, key) => `<path class="level" d="M0 ${y(v)}H420"/><text class="quiet" x="420" y="${y(v) - 5}" text-anchor="end">${said(key)}</text>`;
  const point = (order, b, v, tone) => `<circle class="${tone}" cx="${x(Math.min(b, 1024))}" cy="${y(v)}" r="5"/>`;
  $("curve").innerHTML = ticks + level(stored, "v9.standard") + level(least, "v9.least") +
    `<path class="line j" d="${line("flash1")}"/><path class="line i" d="${line("flash2")}"/>` +
    point("flash1", shape[1], bytesOf("flash1", shape[1]), "j") + point("flash2", shape[0], bytesOf("flash2", shape[0]), "i") +
    (best ? point("flash2", best[0], bytesOf("flash2", best[0]), "i ring-point") : "");
}
$("memory").oninput = drawBlocks;
$("headsize").onchange = drawBlocks;
$("width").onchange = drawBlocks;
views.push((now, before) => moved(before, "lang") && drawBlocks());
