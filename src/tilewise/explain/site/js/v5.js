// V5: masks, in blocks of several sizes.
function preset() {
  const mask = Number($("preset").value), block = document.querySelector("input[name=size]:checked").value;
  for (const map of all(".map")) map.toggleAttribute("hidden", map.dataset.mask !== String(mask));
  for (const tiles of all(".map [data-size]")) tiles.toggleAttribute("hidden", tiles.dataset.size !== block);
  for (const [name, text] of Object.entries(DATA.presets[mask][block])) $(`v5-${name}`).textContent = text;
}
$("preset").onchange = preset;
$("size").onchange = preset;
