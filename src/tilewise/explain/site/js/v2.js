// V2: what is where, and what crosses.
const PHASES = ["load", "scores", "softmax", "output", "done"];
let phase = "done";
const SIGNS = DATA.signs;

/** What the multiprocessor holds, in bytes, at the cursor's step and phase. Between tiles there are no scores. */
function chip() {
  const none = { q: 0, k: 0, v: 0, S: 0, P: 0, O: 0, ml: 0 }, step = current();
  if (step.i === undefined || run().kind(step) === "EMPTY" || !forward()) return none;
  const size = run().footprint[`${run().queries(step.i)[1]}×${run().keys(step.j)[1]}`];
  const here = { ...size, S: phase === "scores" ? size.S : 0, P: phase === "softmax" || phase === "output" ? size.P : 0 };
  if (phase !== "done") return here;
  return OUTER[step.part] === "j" ? { ...here, q: 0, O: 0, ml: 0 } : { ...here, k: 0, v: 0 };
}

views.push(function places(now, before) {
  const step = current(), sum = counted(), standard = now.order === "standard";
  const bars = document.querySelector(`.bars[data-run="${CSS.escape(now.run)}"]`);
  if (moved(before, "run", "order", "pass")) {
    for (const bar of all("li.stored")) bar.remove();
    if (standard) {
      const template = document.querySelector(`template.stored[data-of="${CSS.escape(now.run)}"]`);
      for (const bar of template.content.cloneNode(true).querySelectorAll("li")) bar.classList.add("stored"), bars.append(bar);
    }
    for (const bar of all("li", bars)) bar.toggleAttribute("hidden", bar.classList.contains("late") && now.pass === "fwd");
    document.querySelector(".absent").toggleAttribute("hidden", standard);
  }
  for (const bar of all("li", bars)) {
    const name = bar.dataset.tensor, key = name.toLowerCase(), cells = all("i", bar);
    const index = cells.length === 1 ? 0 : bar.classList.contains("n") ? step.i : step.j;
    bar.classList.toggle("in", key in step.load);
    bar.classList.toggle("out", key in step.store);
    const kept = steps().slice(0, now.step + 1).filter((s) => s.store[key] && s.head === step.head);
    const full = new Set(kept.map((s) => (cells.length === 1 || s.i === undefined ? -1 : bar.classList.contains("n") ? s.i : s.j)));
    const made = !["q", "k", "v", "do"].includes(key) && !(now.pass === "bwd" && (key === "o" || key === "lse"));
    cells.forEach((cell, x) => {
      cell.classList.toggle("now", (key in step.load || key in step.store) && (x === index || step.i === undefined));
      cell.classList.toggle("blank", made && !full.has(x) && !full.has(-1));
    });
  }
  flows(step);
  for (const [id, size] of [["hbm-read", sum.read], ["hbm-write", sum.write], ["ghost", ghost(sum)]]) {
    $(id).textContent = bytes(size);
    $(`${id}-bar`).style.width = `${(100 * size) / most()}%`;
  }
  const names = [...new Set([...Object.keys(sum.load), ...Object.keys(sum.store)])];
  $("by-tensor").innerHTML = names.map((name) => `<tr><th scope="row">${SIGNS[name]}</th><td>${bytes(sum.load[name] || 0)}</td><td>${bytes(sum.store[name] || 0)}</td></tr>`).join("");
  showPhase();
});

/** Standard attention's bytes at the same share of the work. */
function ghost(sum) {
  const last = totals(run(), state).at(-1);
  return Math.round(run().standard[state.pass] * (last.flops ? sum.flops / last.flops : 1));
}
const most = () => Math.max(run().standard[state.pass], totals(run(), state).at(-1).read + totals(run(), state).at(-1).write);

function flows(step) {
  const list = [...Object.entries(step.load).map(([name, size]) => [name, size, "in"]), ...Object.entries(step.store).map(([name, size]) => [name, size, "out"])];
  $("flows").innerHTML = list.length
    ? list.map(([name, size, way]) => `<li class="flow ${way} ${side(name)}"><b>${SIGNS[name]}</b> ${bytes(size)}</li>`).join("")
    : `<li class="nothing">${said("v2.nothing")}</li>`;
}
const side = (name) => (/^(k|v|dk|dv)$/.test(name) ? "j" : /^(o|do)$/.test(name) ? "o" : /^(lse|m|l|delta)$/.test(name) ? "m" : "i");

function showPhase() {
  const here = chip(), now = Object.values(here).reduce((a, b) => a + b, 0), on = PHASES.indexOf(phase);
  for (const part of all("[data-chip]")) {
    part.classList.toggle("off", !here[part.dataset.chip]);
    part.classList.toggle("gone", phase === "done" && now > 0 && (part.dataset.chip === "S" || part.dataset.chip === "P"));
  }
  for (const line of all("[data-phase]")) line.classList.toggle("now", line.dataset.phase === phase && now > 0);
  for (const line of all("[data-code]")) line.classList.toggle("now", line.dataset.code === phase && now > 0);
  $("chip-note").textContent = forward() ? "" : said(state.order === "standard" ? "v2.streams" : "v2.backward");
  $("chip-now").textContent = bytes(now);
  $("chip-peak").textContent = bytes(run().peak);
  return on;
}
for (const line of all("#lines .line")) {
  line.onclick = () => {
    phase = line.parentElement.dataset.phase;
    showPhase();
  };
}
