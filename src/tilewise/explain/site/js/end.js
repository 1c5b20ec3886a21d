// Ready: the address says where to begin.
window.explain = {
  version: DATA.package,
  ready: false,
  state: () => ({ ...state, ...{ i: current().i, j: current().j, kind: run().kind(current()), playing: playing() } }),
  goto: (index) => at(index),
  counters: () => ({ ...counted(), chip: chip(), peak: run().peak }),
  runs: () => Object.keys(RUNS),
  absorb, empty, finish, fold,
};
begin();
{
  const [first, view] = read(location.hash);
  const blank = { ...state, run: null, lang: null };
  state = settle(first);
  for (const each of views) each(state, blank);
  if (view) show(view);
}
document.documentElement.classList.add("ready");
// once every view has its height, those out of sight need no layout
requestAnimationFrame(() => requestAnimationFrame(() => document.documentElement.classList.add("drawn")));
window.explain.ready = true;
