// V7: two halves of the row above, and the ring.
function drawMerge() {
  const { s, v } = hand, middle = Math.ceil(s.length / 2), e = v[0].length;
  const [a, b] = [absorb(empty(e), s.slice(0, middle), v.slice(0, middle)), absorb(empty(e), s.slice(middle), v.slice(middle))];
  const [one, two] = [finish(a).lse, finish(b).lse], whole = finish(absorb(empty(e), s, v)).lse;
  const weight = (x) => (whole === -Infinity ? 0 : Math.exp(x - whole));
  $("merge-l1").textContent = number(one);
  $("merge-l2").textContent = number(two);
  $("merge-l").textContent = number(whole);
  $("merge-w").textContent = `${number(weight(one))} ${number(weight(two))}`;
  const share = 420 * weight(one);
  $("weight-1").setAttribute("width", share);
  $("weight-2").setAttribute("x", share);
  $("weight-2").setAttribute("width", 420 * weight(two));
}

let hop = 0;
function ring() {
  const layout = document.querySelector("input[name=layout]:checked").value;
  for (const figure of all(".ring [data-layout]")) figure.toggleAttribute("hidden", figure.dataset.layout !== layout);
  for (const frame of all(".hop-now")) frame.setAttribute("x", 193 + 26 * hop);
  $("ring-hop").textContent = hop;
}
$("layout").onchange = ring;
$("ring-back").onclick = () => ((hop = Math.max(0, hop - 1)), ring());
$("ring-next").onclick = () => ((hop = Math.min(3, hop + 1)), ring());
ring();
