"use strict";

const boxes = [...document.querySelectorAll("#settings input")];
const ROW = 56;
const number = (cell) => Number.parseFloat(cell.dataset.number); // NaN where there is none

// Plots: those with rows get as high as their rows need, and count y from each row.
function draw(place, shown) {
  const { data, layout, rows } = place.spec;
  const names = rows.map(([name]) => name).filter((name) => shown.has(name));
  const isRows = rows.length > 0;
  const traces = data
    .filter((trace) => trace.meta === undefined || shown.has(trace.meta))
    .map((trace) => (isRows && trace.meta !== undefined
      ? { ...trace, y: trace.y.map((y) => y + names.indexOf(trace.meta)) } : { ...trace }));
  const touch = matchMedia("(pointer: coarse)").matches;
  const axes = isRows ? {
    tickvals: names.map((_, row) => row), ticktext: rows.filter(([name]) => shown.has(name)).map(([, label]) => label),
    range: [names.length - 0.5, -0.6], showgrid: false, zeroline: false, fixedrange: true,
  } : { showgrid: true, zeroline: false };
  const height = isRows ? 90 + (layout.height || ROW) * names.length + (layout.showlegend ? 60 : 0) : layout.height || 380;
  place.style.height = `${height}px`; // also while plotly changes its width
  Plotly.react(place, traces, {
    ...layout,
    xaxis: { ...layout.xaxis, automargin: true, zeroline: false, showgrid: true, nticks: place.clientWidth < 500 ? 5 : 10 },
    yaxis: { ...layout.yaxis, automargin: true, ...axes },
    height,
    margin: { l: 10, r: 20, t: 10, b: 50 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 13 },
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    hovermode: "closest", hoverlabel: { bgcolor: "#2b3138", bordercolor: "#2b3138", font: { color: "#fff" } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    dragmode: touch ? false : "zoom",
  }, { responsive: true, displayModeBar: false });
}

function show() {
  const shown = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
  if (window.Plotly) for (const place of plots) draw(place, shown);
  for (const row of document.querySelectorAll("tr[data-setting]")) row.hidden = !shown.has(row.dataset.setting);
}

// Tables: a click on a column sorts by it, the next the other way round; what is no number stays last.
function sort(header) {
  const column = header.cellIndex;
  const up = header.getAttribute("aria-sort") !== "ascending";
  const body = header.closest("table").tBodies[0];
  const isNumbers = [...body.rows].some((row) => !Number.isNaN(number(row.cells[column])));
  const compare = (a, b) => {
    if (!isNumbers) return a.textContent.localeCompare(b.textContent) * (up ? 1 : -1);
    const [x, y] = [number(a), number(b)];
    return Number.isNaN(x) - Number.isNaN(y) || (up ? x - y : y - x) || 0;
  };
  body.append(...[...body.rows].sort((a, b) => compare(a.cells[column], b.cells[column])));
  for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
}

const decode = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));

// Files: browsers take data links up to 2 MB only, but blobs of any size.
function save(event) {
  const link = event.currentTarget;
  if (!link.href.startsWith("data:")) return;
  event.preventDefault();
  link.href = URL.createObjectURL(new Blob([decode(link.href.split(",")[1])], { type: "text/csv;charset=utf-8" }));
  link.click();
}

// Plotly is packed, which makes the file less than half as large.
async function unpack(packed) {
  const stream = new Blob([decode(packed)]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.text = await new Response(stream).text();
  document.body.append(script);
}

const plots = document.querySelectorAll(".plot");
for (const place of plots) place.spec = JSON.parse(place.nextElementSibling.textContent);
for (const box of boxes) box.addEventListener("change", show);
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sort(button.parentElement));
for (const link of document.querySelectorAll("a[download]")) link.addEventListener("click", save);
unpack(document.getElementById("plotly").textContent).then(show, (error) => {
  for (const place of plots) place.textContent = `This browser draws no plots (${error.message}); the table has the numbers.`;
});
