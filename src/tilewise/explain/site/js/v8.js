// V8: rooflines. The second of the page's two functions: how long each part of a machine needs.
const machine = () => DATA.machines.find((m) => m.key === $("device").value);

/** Seconds that matrix units, exponentials, HBM and L2 need for `work`; `cached`: HBM moves each tensor once. */
function roofline(work, m, cached) {
  const seconds = { matrix: work.flops / m.matrix, exp: work.exps / m.exp, HBM: (cached ? work.least : work.bytes) / m.hbm };
  if (m.l2 !== null) seconds.L2 = work.bytes / m.l2;
  return seconds;
}
const slowest = (seconds) => Object.keys(seconds).reduce((a, b) => (seconds[b] > seconds[a] ? b : a));

function time(x) {
  if (x === undefined) return "–";
  for (const [unit, scale] of [["s", 1], ["ms", 1e3], ["µs", 1e6]]) if (x * scale >= 0.9995) return `${Number((x * scale).toPrecision(3))} ${unit}`;
  return `${Number((x * 1e9).toPrecision(3))} ns`;
}

function drawRoofline() {
  const m = machine(), problem = DATA.problems[$("problem").value], figure = $("problem").value === "figure";
  const x = (i) => (420 * Math.log10(i)) / 4, y = (f) => (220 * (3.7 - Math.log10(f / 1e12))) / 4.2;
  for (const roof of all(".roof")) roof.classList.toggle("now", roof.dataset.machine === m.key);
  const ridge = m.matrix / m.hbm;
  $("ridge").textContent = ridge.toFixed(0);
  // the paper counts every byte that its walk asks for; elsewhere memory may serve each tensor once, at best
  const points = [["standard", "bytes", "bad"], ["flash", "bytes", figure ? "i" : "walk"]];
  if (!figure) points.push(["flash", "least", "i"]);
  $("roof-points").innerHTML = points
    .map(([who, kind, tone]) => {
      const intensity = problem[who].flops / problem[who][kind], top = Math.min(m.matrix, intensity * m.hbm);
      const side = intensity > 1500 ? -10 : 10;
      return `<path class="drop ${tone}" d="M${x(intensity)} ${y(top)}V220"/><circle class="${tone}" cx="${x(intensity)}" cy="${y(top)}" r="5.5" data-who="${who}" data-kind="${kind}" data-intensity="${intensity}"/><text x="${x(intensity) + side}" y="${y(top) + (tone === "walk" ? 24 : -12)}" text-anchor="${side < 0 ? "end" : "start"}">${said(`v8.point.${tone === "walk" ? "walk" : who}`)} ${intensity.toFixed(0)}</text>`;
    })
    .join("") + `<path class="ridge" d="M${x(ridge)} ${y(m.matrix)}V220"/>`;
  $("bounds").innerHTML = points
    .map(([who, kind, tone]) => {
      const seconds = roofline(problem[who], m, kind === "least"), binds = slowest(seconds);
      const cells = ["matrix", "HBM", "exp", "L2"].map((part) => `<td${part === binds ? ' class="binds"' : ""}>${time(seconds[part])}</td>`).join("");
      return `<tr><th scope="row">${said(`v8.point.${tone === "walk" ? "walk" : who}`)}</th><td>${(problem[who].flops / problem[who][kind]).toFixed(0)}</td>${cells}<td class="mono">${said(`v8.part.${binds}`)}</td></tr>`;
    })
    .join("");
}
$("device").onchange = () => {
  $("memory").value = machine().kilobytes;
  drawRoofline();
  drawBlocks();
};
$("problem").onchange = drawRoofline;
views.push((now, before) => moved(before, "lang") && drawRoofline());
