// Play, step, scrub, keys, language and theme.
let timer = 0;
let speed = 2;
const playing = () => timer !== 0;

function pause() {
  clearTimeout(timer);
  timer = 0;
  document.body.classList.remove("playing");
  $("play").setAttribute("aria-label", said("play"));
  say();
}
function play() {
  if (state.step >= steps().length - 1) go({ step: 0 });
  document.body.classList.add("playing");
  $("play").setAttribute("aria-label", said("pause"));
  tick();
}
function tick() {
  timer = setTimeout(() => {
    step(1);
    state.step >= steps().length - 1 ? pause() : tick();
  }, 1000 / speed);
}

/** Move the cursor; the chosen row stays at its place in the block. */
function at(index, jump = false) {
  const to = Math.max(0, Math.min(index, steps().length - 1)), from = current(), next = steps()[to], b = run().problem.block_m;
  const change = { step: to };
  if (from.i !== next.i && Math.floor(state.row / b) === from.i && next.i !== undefined) change.row = next.i * b + (state.row % b);
  go(change, jump);
}
const step = (by) => at(state.step + by);

/** The first step of the next or previous block of the outer loop. */
function block(by) {
  const outer = (x) => (x.i === undefined ? `${x.name}` : `${x.part}/${x.head}/${OUTER[x.part] === "j" ? x.j : x.i}`);
  const all = steps();
  let t = state.step;
  if (by > 0) while (t < all.length - 1 && outer(all[t]) === outer(current())) t++;
  else {
    while (t > 0 && outer(all[t]) === outer(current())) t--;
    while (t > 0 && outer(all[t - 1]) === outer(all[t])) t--;
  }
  at(t);
}
const OUTER = { dkdv: "j", forward1: "j", backward1: "j" };

function tile(i, j) {
  const head = current().head || 0;
  const t = steps().findIndex((s) => s.i === i && s.j === j && s.head === head);
  if (t >= 0) at(t, true);
}

/** Tell a screen reader where the cursor is, unless steps come too fast to be heard. */
function say() {
  if (!playing() || speed <= 1) $("live").textContent = sentence();
}

const KEYS = {
  " ": () => (playing() ? pause() : play()),
  ArrowRight: (e) => (e.shiftKey ? block(1) : step(1)),
  ArrowLeft: (e) => (e.shiftKey ? block(-1) : step(-1)),
  Home: () => at(0),
  End: () => at(steps().length - 1),
  ArrowDown: () => go({ row: state.row + 1 }),
  ArrowUp: () => go({ row: state.row - 1 }),
  l: () => go({ lang: state.lang === "en" ? "zh" : "en" }),
  t: () => go({ theme: { auto: "light", light: "dark", dark: "auto" }[state.theme] }),
  "?": () => $("help").showModal(),
};

document.addEventListener("keydown", (e) => {
  if (e.defaultPrevented || e.ctrlKey || e.metaKey || e.altKey || $("help").open) return;
  const tag = e.target.tagName;
  if (tag === "INPUT" || tag === "SELECT" || tag === "TEXTAREA") return;
  if (e.key === " " && (tag === "BUTTON" || tag === "SUMMARY" || tag === "A")) return;
  const key = e.key.length === 1 ? e.key.toLowerCase() : e.key;
  if (/^\d$/.test(key)) show(`v${key}`);
  else if (KEYS[key]) KEYS[key](e);
  else return;
  e.preventDefault();
});

/** Bring a view to the top and remember it in the address. */
function show(view) {
  const target = $(view);
  if (!target) return;
  target.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  $(`${view}-title`)?.focus({ preventScroll: true });
}
document.addEventListener("click", (e) => {
  const link = e.target.closest("a[href^='#v']");
  if (link) {
    e.preventDefault();
    show(link.getAttribute("href").slice(1));
  }
  const copy = e.target.closest("[data-copy]");
  if (copy) copyText(copy);
  if (e.detail && e.target.type === "radio") e.target.blur(); // chosen with a pointer: the arrow keys stay the page's
});

function copyText(button) {
  const text = $(button.dataset.copy).innerText;
  const done = () => {
    button.textContent = said("copied");
    setTimeout(() => (button.textContent = said("copy")), 1500);
  };
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(done, () => select(button));
  select(button);
}
/** Where a page may not write the clipboard, select the text instead. */
function select(button) {
  getSelection().selectAllChildren($(button.dataset.copy));
}

function begin() {
  $("home").onclick = () => at(0);
  $("back").onclick = () => step(-1);
  $("play").onclick = KEYS[" "];
  $("next").onclick = () => step(1);
  $("end").onclick = () => at(steps().length - 1);
  $("scrub").oninput = (e) => at(Number(e.target.value));
  $("run").onchange = (e) => go({ run: e.target.value, step: 0, row: 0 }, true);
  $("order").onchange = (e) => go({ order: e.target.value, step: 0 }, true);
  $("pass").onchange = (e) => go({ pass: e.target.value, step: 0 }, true);
  $("speed").onchange = (e) => (speed = Number(e.target.value));
  $("language").onclick = KEYS.l;
  $("theme").onclick = KEYS.t;
  $("help-open").onclick = KEYS["?"];
  for (const button of all("[data-row]")) button.onclick = () => go({ row: state.row + Number(button.dataset.row) });
  addEventListener("popstate", () => go(read(location.hash)[0]));
  let shown;
  addEventListener("beforeprint", () => ((shown = { step: state.step, row: state.row }), at(steps().length - 1))); // paper has the end of the run
  addEventListener("afterprint", () => go(shown));
}

views.push(function frame(now, before) {
  const root = document.documentElement;
  root.lang = { en: "en", zh: "zh-CN" }[now.lang];
  root.dataset.theme = now.theme;
  $("theme-name").textContent = said(`theme.${now.theme}`);
  if (moved(before, "lang")) {
    for (const element of all("[data-aria]")) element.setAttribute("aria-label", said(`aria.${element.dataset.aria}`));
    for (const option of all("[data-t]")) option.textContent = said(`aria.${option.dataset.t}`);
    document.title = said("title", { name: run().title });
  }
  $("run").value = now.run;
  for (const name of ["order", "pass"]) {
    for (const input of all(`input[name=${name}]`)) {
      input.checked = input.value === now[name];
      input.disabled = name === "order" ? !run().orders[input.value] : !run().orders[now.order][input.value]?.length;
    }
  }
  if (moved(before, "run")) {
    for (const slot of all("[data-slot]")) slot.textContent = run().facts[slot.dataset.slot];
    for (const bar of all("[data-versus]")) bar.querySelector(".fill").setAttribute("width", run().versus[bar.dataset.versus]);
    for (const figure of all("[data-run]")) figure.toggleAttribute("hidden", figure.dataset.run !== now.run);
  }
  const scrub = $("scrub");
  scrub.max = steps().length - 1;
  scrub.value = now.step;
  scrub.setAttribute("aria-valuetext", sentence());
  $("sentence").textContent = sentence();
  $("bar-read").textContent = bytes(counted().read);
  $("bar-write").textContent = bytes(counted().write);
  if (moved(before, "run", "order", "pass")) ticks();
  say();
});

/** One mark a step over the scrub bar; hollow where the tile is skipped. */
function ticks() {
  const list = steps(), wide = 1000 / list.length;
  $("ticks").innerHTML = list.length > 512 ? "" : list
    .map((s, t) => `<rect class="${run().kind(s) || "whole"}" x="${(t + 0.1) * wide}" y="1" width="${0.8 * wide}" height="8"/>`)
    .join("");
}
