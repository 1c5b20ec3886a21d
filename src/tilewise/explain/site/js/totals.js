// Running sums over the steps of a pass: what the meters show.
const SUMS = new Map();

/** For every step: bytes read and written so far, by tensor and in all, and operations. */
function totals(run, state) {
  const key = [run.name, state.order, state.pass].join("/");
  if (!SUMS.has(key)) {
    let sum = { read: 0, write: 0, flops: 0, exps: 0, load: {}, store: {} };
    const made = run.steps(state).map((step) => {
      const next = { ...sum, load: { ...sum.load }, store: { ...sum.store } };
      for (const [name, size] of Object.entries(step.load)) (next.load[name] = (next.load[name] || 0) + size), (next.read += size);
      for (const [name, size] of Object.entries(step.store)) (next.store[name] = (next.store[name] || 0) + size), (next.write += size);
      next.flops += step.flops;
      next.exps += step.exps;
      return (sum = next);
    });
    SUMS.set(key, made);
  }
  return SUMS.get(key);
}
const counted = () => totals(run(), state)[state.step];

/** Which of the steps up to the cursor was the last to visit the row's block, or undefined. */
function lastVisit(row) {
  const block = Math.floor(row / run().problem.block_m), head = current().head;
  for (let t = state.step; t >= 0; t--) {
    const step = steps()[t];
    if (step.i === block && step.head === head && run().kind(step) !== "EMPTY") return step;
  }
}

function sentence() {
  const step = current(), last = steps().length - 1;
  const head = run().problem.h > 1 && step.head !== undefined ? said("head", { head: step.head }) : "";
  if (step.i === undefined) return said("whole", { step: state.step, last, name: step.name });
  return said(run().kind(step) === "EMPTY" ? "empty" : "visit", { step: state.step, last, head, i: step.i, j: step.j, kind: run().kind(step) });
}
