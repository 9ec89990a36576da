for (const id of state.off ?? []) if (byId(id)) byId(id).checked = false;
drawCharts();
const summaries = () => [...document.querySelectorAll("details > summary")];

if (byId("samples")) {
  const AT_ONCE = 50, form = byId("search"), data = JSON.parse(byId("samples").textContent);
  const rows = data.rows.map(([step, prompt, answer, reward, right, length, turns]) =>
    ({ step, prompt, answer, reward, right, length, turns, text: [answer, ...turns.flat()].join("\n").toLowerCase() }));
  const prompts = data.prompts.map((text) => text.toLowerCase()), sizes = new Map();
  const groupOf = (row) => row.step + " " + row.prompt;
  let first = Infinity, last = 0;
  for (const row of rows) {
    sizes.set(groupOf(row), (sizes.get(groupOf(row)) ?? 0) + 1);
    [first, last] = [Math.min(first, row.step), Math.max(last, row.step)];
  }
  const node = (tag, className, textContent) => Object.assign(document.createElement(tag), { className, textContent });
  let matches = [], shown = 0, group = null;
  if (state.group) group = state.group.step + " " + data.prompts.indexOf(state.group.prompt); // the newer ones have other places
  if (!sizes.has(group)) group = null;

  const card = (row) => {
    const result = row.right ? "right" : "wrong";
    const all = node("article", "sample card " + result, ""), text = node("pre", "", ""), foot = node("footer", "", "");
    text.append(node("span", "prompt", data.prompts[row.prompt]));
    for (const [read, said] of row.turns) {
      if (read) text.append(node("span", "prompt turn", read));
      text.append(node("span", row.turns.length > 1 ? "turn" : "", said));
    }
    const about = node("span", "", "step " + row.step + " · " + row.length.toLocaleString("en") + " characters" +
      (row.turns.length > 1 ? " · " + row.turns.length + " turns" : "") + " · answer ");
    about.append(node("code", "", row.answer));
    const its = node("button", "", group ? "all samples" : "its group of " + sizes.get(groupOf(row)));
    its.addEventListener("click", () => { group = group ? null : groupOf(row); search(); });
    foot.append(about, node("span", "chip " + result, (row.right ? "✓ right" : "✗ wrong") + " · reward " + Number(row.reward.toPrecision(3))), its);
    all.append(text, foot);
    return all;
  };
  const show = (count) => {
    const next = matches.slice(shown, shown + count);
    for (const row of next) byId("found").append(card(row));
    shown += next.length;
    byId("more").hidden = shown === matches.length;
  };
  const search = (count = AT_ONCE) => {
    const given = Object.fromEntries(new FormData(form)), words = given.text.toLowerCase();
    const asked = prompts.map((text) => text.includes(words));
    const bound = (name, otherwise) => given[name] === "" ? otherwise : Number(given[name]);
    const [from, to] = [bound("least_reward", -Infinity), bound("most_reward", Infinity)];
    const [shortest, longest] = [bound("least_length", 0), bound("most_length", Infinity)];
    const step = bound("step", null), right = given.result === "right";
    matches = rows.filter((row) => group ? groupOf(row) === group :
      (asked[row.prompt] || row.text.includes(words)) && row.reward >= from && row.reward <= to &&
      row.length >= shortest && row.length <= longest && (step === null || row.step === step) &&
      (!given.result || row.right === right));
    byId("count").textContent = (group ? "The group: " : "") + matches.length.toLocaleString("en") + " of " +
      rows.length.toLocaleString("en") + " samples of steps " + first + " to " + last + ", the latest first. " +
      "Long texts are cut in their middle; samples.jsonl has all samples, whole.";
    byId("found").replaceChildren();
    shown = 0;
    show(count);
  };
  for (const [name, value] of Object.entries(state.fields ?? {})) if (form.elements[name]) form.elements[name].value = value;
  form.addEventListener("input", () => { group = null; search(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => { group = null; search(); }));
  byId("more").addEventListener("click", () => show(AT_ONCE));
  search(state.shown || AT_ONCE);
  if (state.focus) form.elements[state.focus]?.focus({ preventScroll: true });
  addEventListener("pagehide", () => {
    const kept = group && { step: matches[0].step, prompt: data.prompts[matches[0].prompt] };
    state = { ...state, group: kept, shown, fields: Object.fromEntries(new FormData(form)), focus: document.activeElement?.name };
  });
}

for (const each of summaries()) if (state.open?.includes(each.textContent)) each.parentElement.open = true;
const headings = () => [...document.querySelectorAll("h2")], topOf = (node) => node.getBoundingClientRect().top;
const reading = headings().find((each) => each.textContent === state.heading);
if (state.heading !== undefined) scrollTo(0, reading ? scrollY + topOf(reading) - state.top : state.y);
addEventListener("pagehide", () => {
  const open = summaries().filter((each) => each.parentElement.open).map((each) => each.textContent);
  const off = [...document.querySelectorAll("input[type=checkbox]:not(:checked)")].map((each) => each.id);
  const heading = headings().findLast((each) => topOf(each) < innerHeight / 2);
  noteZooms();
  const view = Object.fromEntries(new FormData(byId("view")));
  const place = { heading: heading?.textContent ?? "", top: heading && topOf(heading), y: scrollY };
  try { sessionStorage.setItem(KEY, JSON.stringify({ ...state, open, off, view, logs, zooms, ...place })); } catch { /* nor now */ }
});

const milliseconds = 1000 * (document.body.dataset.again ?? 0);
if (milliseconds) setInterval(() => {
  if (Date.now() - 1000 * document.body.dataset.written > 10 * milliseconds)
    byId("now").textContent = byId("now").textContent.split(";")[0] + "; the run has ended since, or hangs";
  else if (!document.hidden && getSelection().isCollapsed) location.reload();
}, milliseconds);
