"use strict";
const byId = (id) => document.getElementById(id);
const said = (value) => {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 1e7 || (size && size < 1e-4)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return value.toLocaleString("en", size >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 });
};
const tick = (value) => Math.abs(value) < 1e7 && (Math.abs(value) >= 1e-4 || !value) ? value.toLocaleString("en", { maximumFractionDigits: 9 }) : said(value);
const KEY = "rl_megatron report " + location.pathname;
let state = {};
try { state = JSON.parse(sessionStorage.getItem(KEY)) ?? {}; } catch { /* a browser may keep nothing */ }
const plots = [], looks = new Map(), logs = state.logs ?? {}, zooms = state.zooms ?? {}; // by title, and by axis
const form = byId("view"), axes = JSON.parse(form.dataset.axes);
for (const [name, value] of Object.entries(state.view ?? {})) form.elements[name].value = value;
const shownX = () => form.elements.x.value, smoothing = () => Number(form.elements.smoothing.value);
const look = (style, stack = false) => { // color and dashes, as the page's theme has them
  const key = style + (stack ? " of a stack" : "");
  if (!looks.has(key)) {
    const probe = document.body.appendChild(document.createElement("p"));
    probe.className = stack ? "stack" : "";
    const all = getComputedStyle(probe.appendChild(Object.assign(document.createElement("i"), { className: "s" + style })));
    const [color, on, off] = ["--c", "--on", "--off"].map((name) => all.getPropertyValue(name));
    looks.set(key, { color, dash: off === "0px" ? [] : [parseFloat(on), parseFloat(off)] });
    probe.remove();
  }
  return looks.get(key);
};
const ink = (name) => {
  if (!looks.has(name)) looks.set(name, getComputedStyle(document.body).getPropertyValue(name));
  return looks.get(name);
};
const alone = (values) => { // places of values between two gaps, where there is no line to see
  const there = values.flatMap((value, at) => value === undefined ? [] : [at]);
  return there.filter((at, i) => values[at] !== null && [i - 1, i + 1].every((near) => values[there[near]] == null));
};
const isShown = (style) => byId("run" + style)?.checked ?? true;

const moved = (x, style) => { // a step's place on the axis that is shown
  const table = axes[style] ?? axes[0], steps = table?.step, until = table?.[shownX()];
  if (!until?.length || shownX() === "step" || x <= 0) return x;
  let after = steps.findIndex((step) => step >= x);
  if (after < 0) after = steps.length - 1;
  const [from, start] = after ? [steps[after - 1], until[after - 1]] : [0, 0];
  return start + (until[after] - start) * (x - from) / (steps[after] - from);
};
const smoothed = (x, y, mean = y) => { // an exponential moving average by steps: what was left out counts, too
  let sum = 0, weight = 0, before = null;
  return y.map((value, i) => {
    if (value == null || x[i] < 0) return value;
    const kept = smoothing() ** (before === null ? 1 : x[i] - before);
    [before, sum, weight] = [x[i], kept * sum + (1 - kept) * (mean[i] ?? value), kept * weight + 1 - kept];
    return sum / weight;
  });
};

const plot = (box, width, height, last) => {
  const { axis, bars, each, limits, warm, series, log } = box.chart, { title } = box;
  const moves = axis === "step", name = moves && shownX() !== "step" ? shownX() : axis;
  const isLog = log !== null && (logs[title] ?? log), smooth = !bars && moves && smoothing() > 0;
  const label = (x) => x >= 0 ? (name === axis ? axis + " " + said(x) : said(x) + " " + name) + (each > 1 ? ", mean of " + each : "") :
    warm ? "warm-start step " + Math.round((1 + 4 * x / last) * (warm + 1)) : "warm start, " + Math.round(100 + 400 * x / last) + " %";
  const place = (x, style) => x < 0 ? x * last / 4 : moves ? moved(x, style) : x; // of the warm start a fifth
  const columns = ({ x = series[0].x, y, low, high, mean, style }) =>
    [x.map((at) => place(at, style)), y, ...(smooth ? [smoothed(x, y, mean)] : []), ...(low ? [low, high] : [])];
  const data = uPlot.join(series.map(columns)), values = [...data];
  const half = bars ? Math.min(...data[0].slice(1).map((x, i) => x - data[0][i]), Infinity) / 2 : 0;
  if (bars) for (let at = series.length - 1; at > 0; at--) data[at] = data[at].map((y, i) => y + (data[at + 1]?.[i] ?? 0));
  const lines = [{ value: (u, x, at, i) => i == null ? "last" : label(x) }], bands = [], styles = [null];
  for (const { name, style, low } of series) {
    const at = lines.length, text = (at, i) => said(values[at][i ?? values[at].findLastIndex((y) => y != null)]);
    const color = () => look(style, bars).color, { dash } = look(style, bars);
    const main = { stroke: color, width: 2, dash }, top = at + (smooth ? 1 : 0);
    const draw = bars ? { fill: color, width: 0, paths: uPlot.paths.bars({ size: [0.84, 60] }), points: { show: false } } :
      { ...main, ...(smooth && { stroke: () => color() + "55", width: 1 }), points: { size: 5, filter: (u, line, show) => show ? null : alone(data[at]) } };
    const band = (i) => low && text(top + 1, i) !== "–" ? ` (${text(top + 1, i)} to ${text(top + 2, i)})` : "";
    const value = (u, y, line, i) => text(at, i) + band(i);
    lines.push({ label: name, class: "s" + style, show: bars || isShown(style), value, ...draw });
    styles.push(style);
    if (smooth) lines.push({ class: "bound", show: isShown(style), ...main, points: { show: false } }), styles.push(style);
    if (!low) continue;
    for (const side of [1, 2]) lines.push({ class: "bound", show: isShown(style), points: { show: false } }), styles.push(style);
    bands.push({ series: [top + 2, top + 1], fill: (u) => color() + (u.series[at].show ? "26" : "00") });
  }
  const axes = { font: "11px system-ui, sans-serif", stroke: () => ink("--faint"), ticks: { show: false } };
  const shade = (u) => {
    const { left, top, width, height } = u.bbox, end = Math.min(u.valToPos(0, "x", true), left + width), unit = uPlot.pxRatio;
    if (end <= left || data[0][0] >= 0) return;
    u.ctx.fillStyle = ink("--warm");
    u.ctx.fillRect(left, top, end - left, height);
    Object.assign(u.ctx, { fillStyle: ink("--warm-ink"), font: 11 * unit + "px system-ui, sans-serif", textAlign: "left", textBaseline: "top" });
    u.ctx.fillText("warm start", left + 4 * unit, top + 4 * unit);
  };
  const u = new uPlot({
    width, height, padding: [8, 16, 0, 0], series: lines, bands,
    scales: {
      x: { time: false, ...(half < Infinity && bars && { range: (u, low, high) => [low - half, high + half] }) },
      y: isLog ? { distr: 3, range: (u, low, high) => [low * 0.9, high * 1.1] } : limits ? { range: limits } : bars ? { range: (u, low, high) => [0, high || 1] } : {},
    },
    axes: [
      { ...axes, size: 24, gap: 4, grid: { show: false }, values: (u, at) => at.map((x) => x < 0 || x % 1 ? "" : tick(x)) },
      { ...axes, gap: 4, grid: { stroke: () => ink("--grid"), width: 1 }, values: (u, at) => at.map((y) => y == null ? "" : tick(y)),
        size: (u, texts) => 12 + 6.4 * Math.max(3, ...(texts ?? []).map((text) => text.length)) },
    ],
    cursor: { y: false, points: bars ? { show: false } : {}, sync: { key: axis, scales: ["x", null] } },
    legend: { markers: { width: 0, fill: () => "" }, mount: (u, table) => box.after(table) },
    hooks: { drawClear: [shade] },
  }, data, box);
  const observer = new ResizeObserver(() => u.setSize({ width: box.clientWidth, height: box.clientHeight }));
  observer.observe(box);
  plots.push({ u, box, axis, observer, styles: bars ? [] : styles });
  if (zooms[axis]) u.setScale("x", { min: zooms[axis][0], max: zooms[axis][1] });
};

const boxes = [...document.querySelectorAll(".plot")];
for (const box of boxes) {
  box.chart = JSON.parse(box.dataset.chart);
  box.title = box.previousElementSibling.querySelector("h3").textContent;
}
const drawCharts = () => { // those that are not folded, and not yet drawn
  const found = boxes.filter((box) => !box.closest("details:not([open])") && !plots.some((one) => one.box === box));
  const sizes = found.map((box) => [box.clientWidth, box.clientHeight]);
  const ends = boxes.flatMap(({ chart: { axis, series } }) => axis === "step" ?
    series.map(({ x = series[0].x, style }) => moved(x.at(-1) ?? 0, style)) : []);
  found.forEach((box, i) => plot(box, ...sizes[i], Math.max(...ends)));
  form.querySelector("output").textContent = smoothing().toFixed(2);
  for (const each of document.querySelectorAll(".log")) {
    const { chart, title } = each.closest("figure").querySelector(".plot");
    each.ariaPressed = logs[title] ?? chart.log;
  }
};
const noteZooms = () => { // by axis, what all its charts show, if one is zoomed in
  for (const axis of new Set(plots.map((one) => one.axis))) {
    const one = plots.filter(({ u, box, axis: its }) => its === axis && !box.chart.bars && u.scales.x.min != null)
      .find(({ u: { scales: { x }, data: [all] } }) => x.min > all[0] || x.max < all.at(-1));
    zooms[axis] = one && [one.u.scales.x.min, one.u.scales.x.max];
  }
};
const drawAgain = (changed = () => true) => {
  for (const one of plots.filter(changed)) {
    one.observer.disconnect();
    one.u.destroy();
    plots.splice(plots.indexOf(one), 1);
  }
  drawCharts();
};
form.addEventListener("input", ({ target }) => {
  if (target.name === "x") delete zooms.step;
  else noteZooms();
  drawAgain();
});
addEventListener("click", ({ target }) => {
  if (!target.matches(".log")) return;
  const box = target.closest("figure").querySelector(".plot");
  logs[box.title] = !(logs[box.title] ?? box.chart.log);
  noteZooms();
  drawAgain((one) => one.box === box);
});
document.addEventListener("toggle", () => { noteZooms(); drawCharts(); }, true);
addEventListener("change", (event) => {
  if (!event.target.closest(".legend")) return;
  for (const { u, styles } of plots) u.batch(() => styles.forEach((style, i) => {
    if (style !== null && u.series[i].show !== isShown(style)) u.setSeries(i, { show: isShown(style) });
  }));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  looks.clear();
  for (const { u } of plots) u.redraw(false, true);
});
