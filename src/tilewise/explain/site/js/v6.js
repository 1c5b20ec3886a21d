// V6: backward, at the tile under the cursor.
views.push(function backward(now, before) {
  if (!moved(before, "run", "step", "order", "pass")) return;
  const has = run().has("dS");
  $("backward-tiles").toggleAttribute("hidden", !has);
  $("backward-none").toggleAttribute("hidden", has);
  $("show-backward").disabled = !has;
  if (!has) return;
  const tile = tileScores();
  for (const name of ["P", "dS"]) {
    const matrix = run()[name], svg = $(`back-${name}`);
    if (!tile) wipe(svg);
    else heat(svg, tile.rows, tile.cols, (r, c) => (tile.s(r, c) === null ? null : matrix.at(tile.head, tile.i + r, tile.j + c)), undefined, Math.abs);
  }
});
$("show-backward").onclick = () => {
  go({ pass: "bwd", step: 0 }, true);
  show("v1");
};
