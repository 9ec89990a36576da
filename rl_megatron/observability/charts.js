"use strict";
const byId = (id) => document.getElementById(id);
const said = (value) => {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 1e7 || (size && size < 1e-4)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return value.toLocaleString("en", size >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 });
};
const tick = (value) => Math.abs(value) < 1e7 ? value.toLocaleString("en", { maximumFractionDigits: 9 }) : said(value);
const plots = [], looks = new Map();
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

const plot = (box, width, height, { axis, bars, each, limits, warm, series }, last) => {
  const half = bars ? each / 2 : 0;
  const label = (x) => x >= 0 ? axis + " " + said(x) + (each > 1 ? ", mean of " + each : "") :
    warm ? "warm-start step " + Math.round((1 + 4 * x / last) * (warm + 1)) : "warm start, " + Math.round(100 + 400 * x / last) + " %";
  const place = (x) => x < 0 ? x * last / 4 : x; // of the warm start a fifth
  const columns = ({ x = series[0].x, y, low, high }) => [x.map(place), y, ...(low ? [low, high] : [])];
  const data = uPlot.join(series.map(columns)), values = [...data];
  if (bars) for (let at = series.length - 1; at > 0; at--) data[at] = data[at].map((y, i) => y + (data[at + 1]?.[i] ?? 0));
  const lines = [{ value: (u, x, at, i) => i == null ? "last" : label(x) }], bands = [], styles = [null];
  for (const { name, style, low } of series) {
    const at = lines.length, text = (at, i) => said(values[at][i ?? values[at].findLastIndex((y) => y != null)]);
    const color = () => look(style, bars).color, { dash } = look(style, bars);
    const draw = bars ? { fill: color, width: 0, paths: uPlot.paths.bars({ size: [0.84, 60] }), points: { show: false } } :
      { stroke: color, width: 2, dash, points: { size: 5, filter: (u, line, show) => show ? null : alone(data[at]) } };
    const band = (i) => low && text(at + 1, i) !== "–" ? ` (${text(at + 1, i)} to ${text(at + 2, i)})` : "";
    const value = (u, y, line, i) => text(at, i) + band(i);
    lines.push({ label: name, class: "s" + style, show: bars || isShown(style), value, ...draw });
    styles.push(style);
    if (!low) continue;
    for (const side of [1, 2]) lines.push({ class: "bound", show: isShown(style), points: { show: false } }), styles.push(style);
    bands.push({ series: [at + 2, at + 1], fill: (u) => color() + (u.series[at].show ? "26" : "00") });
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
      x: { time: false, ...(bars && { range: (u, low, high) => [low - half, high + half] }) },
      y: limits ? { range: limits } : bars ? { range: (u, low, high) => [0, high || 1] } : {},
    },
    axes: [
      { ...axes, size: 24, gap: 4, grid: { show: false }, values: (u, at) => at.map((x) => x < 0 || x % 1 ? "" : tick(x)) },
      { ...axes, gap: 4, grid: { stroke: () => ink("--grid"), width: 1 }, values: (u, at) => at.map(tick),
        size: (u, texts) => 12 + 6.4 * Math.max(3, ...(texts ?? []).map((text) => text.length)) },
    ],
    cursor: { y: false, points: bars ? { show: false } : {}, sync: { key: axis, scales: ["x", null] } },
    legend: { markers: { width: 0, fill: () => "" }, mount: (u, table) => box.after(table) },
    hooks: { drawClear: [shade] },
  }, data, box);
  plots.push({ u, styles: bars ? [] : styles });
  new ResizeObserver(() => u.setSize({ width: box.clientWidth, height: box.clientHeight })).observe(box);
};

const drawCharts = () => {
  const boxes = [...document.querySelectorAll(".plot")], sizes = boxes.map((box) => [box.clientWidth, box.clientHeight]);
  const charts = boxes.map((box) => JSON.parse(box.dataset.chart));
  const ends = charts.flatMap(({ axis, series }) => axis === "step" ? series.map(({ x }) => x?.at(-1) ?? 0) : []);
  boxes.forEach((box, i) => plot(box, ...sizes[i], charts[i], Math.max(1, ...ends)));
};
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
