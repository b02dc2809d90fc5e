"use strict";
const DASHES = ["solid", "dash", "dot"];  // of runs that have the same color
const POINTS = 1500;  // of a curve that is drawn
const PARTS = {
  steps: ["steps", "#2c9c5a"], compiling: ["compiling", "#3b7dd8"], evaluating: ["evaluating, sampling", "#7d5fd0"],
  saving: ["saving", "#0e9aa7"], restoring: ["restoring", "#a8842c"], waiting: ["waiting for data", "#e07b28"],
  starting: ["starting", "#8a94a1"], lost: ["lost to restarts", "#d0483e"],
};
const READ = new Map([["tokens", "step"], ["hours", "time"]]);  // the metric that a scale is made of
const $ = id => document.getElementById(id);
const METRICS = ["first", "second"];
let runs = [], view = { ...DEFAULTS };
// Maps and objects without a prototype: a run or a metric may be called __proto__ or constructor.
const flags = new Map();  // {run and version: promise of its flags}
const kept = new Map();  // {run: {version, columns: {metric: values}}}
const cards = new Map();  // {run: its elements in the list}
const drawn = new Map();  // {plot: what it shows, in words}

// --- Elements

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, attributes);
}

// Sets what has changed alone: focus, selected text and what a screen reader reads stay where they are.
function say(element, words) { if (element.textContent !== words) element.textContent = words; }

function setOptions(select, values, wanted) {
  if ([...select.options].map(o => o.value).join("\n") !== values.join("\n"))
    select.replaceChildren(...values.map(value => element("option", value, { value })));
  select.value = values.includes(wanted) ? wanted : values[0] ?? "";
}

function showTable(id, headings, rows, otherwise) {
  const now = JSON.stringify([headings, rows, otherwise]);
  if (drawn.get(id) === now) return;
  drawn.set(id, now);
  $(id).replaceChildren(rows.length ? table(headings, rows) : otherwise);
}

function table(headings, rows) {
  const made = element("table", ""), fill = (kind, cells) => {
    const row = element("tr", "");
    row.append(...cells.map(cell => element(kind, cell)));
    made.append(row);
  };
  if (headings.length) fill("th", headings);
  rows.forEach(row => fill("td", row));
  return made;
}

// --- What the server tells

async function ask(path, parameters = []) {
  const answer = await fetch(`${path}?${new URLSearchParams(parameters)}`);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error.message);
  return content;
}

// What is new of some metrics of a run: all of it where the run wrote its rows anew.
async function read(run, keys) {
  keys = keys.map(key => READ.get(key) ?? key);
  const nothing = version => ({ version, columns: Object.create(null) });
  let known = kept.get(run.name) ?? nothing("");
  const after = Math.min(...keys.map(key => known.columns[key]?.length ?? 0));
  if (known.version === run.version && after >= run.n) return known.columns;
  const asked = [["run", run.name], ["version", known.version], ["after", after], ...keys.map(key => ["key", key])];
  const found = await ask("/api/rows", asked);
  if (found.version !== known.version) known = nothing(found.version);
  kept.set(run.name, known);
  for (const [key, values] of Object.entries(found.columns))
    known.columns[key] = (known.columns[key] ?? []).slice(0, found.after).concat(values);
  known.columns.tokens = known.columns.step?.map(step => step * run.tokens);
  known.columns.hours = known.columns.time?.map(time => (time - run.started) / 3600);
  return known.columns;
}

function flagsOf(run) {
  const key = run.name + run.version;
  const forget = () => flags.delete(key) && { flags: {}, machine: {} };
  if (!flags.has(key)) flags.set(key, ask("/api/flags", [["run", run.name]]).catch(forget));
  return flags.get(key);
}

async function readRuns() {
  const began = run => run.started ?? -Infinity;
  runs = (await ask("/api/runs")).sort((a, b) => began(b) - began(a) || (a.name < b.name ? -1 : 1));
  slotsOf(runs).forEach((slot, name) => runs.find(run => run.name === name).slot = slot);
}

function selected() {
  if (view.runs === "all") return runs;
  return view.run ? runs.filter(run => view.run.includes(run.name)) : runs.slice(0, MOST);
}

// --- The list of runs

function cardOf(name) {
  if (!cards.has(name)) {
    const id = `run${cards.size}`, item = element("li", ""), label = element("label", "", { htmlFor: id });
    const card = { item, box: element("input", "", { type: "checkbox", id }), swatch: element("i", "", { className: "swatch" }) };
    for (const part of ["words", "losses", "left"]) card[part] = element("p", "", { id: `${id}${part}` });
    card.box.setAttribute("aria-describedby", `${id}words ${id}losses ${id}left`);
    card.box.onchange = () => {
      const others = selected().map(run => run.name).filter(other => other !== name);
      change({ runs: "", run: card.box.checked ? [...others, name] : others });
    };
    label.append(card.swatch, name);
    item.append(card.box, label, card.words, card.losses, card.left);
    cards.set(name, card);
  }
  return cards.get(name);
}

function lossesOf(run) {
  if (!run.best) return "";
  const [newest, best] = [run.held_out, run.best].map(([step, loss]) => `${loss.toFixed(4)} at step ${step.toLocaleString("en")}`);
  return newest === best ? `held-out ${newest}, its best` : `held-out ${newest}, best ${best}`;
}

function showList() {
  const list = $("list"), focused = document.activeElement, chosen = new Set(selected());
  const missing = (view.run ?? []).filter(name => !runs.some(run => run.name === name));
  say($("count"), !runs.length ? "There is no run here yet." : `${chosen.size} of ${runs.length} shown, newest first` + (missing.length ? `; not here: ${missing.join(", ")}` : ""));
  [...list.children].forEach(item => runs.some(run => cards.get(run.name)?.item === item) || item.remove());
  runs.forEach((run, i) => {
    const card = cardOf(run.name);
    card.box.checked = chosen.has(run);
    card.swatch.style.borderTop = `.3rem ${DASHES[Math.floor(run.slot / COLORS) % DASHES.length].replace("dot", "dotted").replace("dash", "dashed")} var(--run${run.slot % COLORS})`;
    say(card.words, run.words);
    card.words.className = run.state;
    say(card.losses, lossesOf(run));
    say(card.left, run.left ?? "");
    if (list.children[i] !== card.item) list.insertBefore(card.item, list.children[i] ?? null);
  });
  if (document.activeElement !== focused) focused?.focus({ preventScroll: true });
}

// --- Charts

function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function layout(more) {
  const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true };
  return {
    paper_bgcolor: "#0000", plot_bgcolor: "#0000", font: { color: style("--text"), size: 13 }, margin: { l: 55, r: 15, t: 15, b: 45 },
    hovermode: "closest", hoverlabel: { bgcolor: style("--card"), font: { color: style("--text") }, namelength: -1 }, ...more,
    // where fingers scroll, a drag does not zoom
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

// Draws a plot, unless it shows `now` already: what is under the mouse stays then. moved(event): after a zoom.
function draw(id, now, traces, more, moved) {
  now = JSON.stringify(now);
  if (drawn.get(id) === now) return;
  drawn.set(id, now);
  Plotly.react(id, traces, layout(more), { displayModeBar: false, responsive: true, doubleClick: "autosize", showTips: false });
  $(id).removeAllListeners("plotly_relayout");
  if (moved) $(id).on("plotly_relayout", moved);
}

// A name for plotly, which takes some words in angle brackets for HTML.
function plain(name) { return name.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); }

function nothing(words) { return [{ text: words, showarrow: false, xref: "paper", yref: "paper", x: .5, y: .5 }]; }

// The traces of a metric of a run: the line, and below a smoothed one faintly what it was made of.
function tracesOf(run, columns, metric) {
  const x = columns[view.x] ?? [], values = columns[metric] ?? [], over = +view.smooth;
  const all = values.map((value, i) => i).filter(i => values[i] !== null && i < x.length);
  const [from, to] = within(all.map(i => x[i]), rangeOf(view.zoom));
  const line = (ys, more) => {
    const seen = all.slice(from, to), y = ys.slice(from, to), at = thin(y, POINTS);
    const color = style(`--run${run.slot % COLORS}`), dash = DASHES[Math.floor(run.slot / COLORS) % DASHES.length];
    const points = { x: at.map(i => x[seen[i]]), y: at.map(i => y[i]), name: plain(run.name), type: "scatter" };
    return { ...points, mode: at.length < 60 ? "lines+markers" : "lines", marker: { size: 4 }, line: { color, dash, width: 2 }, ...more };
  };
  const raw = all.map(i => values[i]);
  if (!over) return [line(raw)];
  return [line(raw, { mode: "lines", opacity: .25, hoverinfo: "skip" }), line(smooth(all.map(i => columns.step[i]), raw, over))];
}

// The range of an axis as plotly takes it, the logarithms of a logarithmic one; undefined where it shows all.
function axisRange(words, isLog) {
  const range = rangeOf(words);
  return range && isLog ? range.map(one => one > 0 ? Math.log10(one) : null) : range ?? undefined;
}

async function showCurves() {
  const wanted = [...new Set([view.x, "step", view.first, view.second])], shown = selected();
  // of a run that cannot be read the list says so; the others are shown
  const columns = await Promise.all(shown.map(run => read(run, wanted).catch(() => Object.create(null))));
  const isLog = Boolean(view.log);
  const scale = $("x").selectedOptions[0].textContent;
  const now = [view.x, view.smooth, view.zoom, isLog, shown.map((run, j) => [run.name, run.slot, run.version, columns[j].step?.length])];
  for (const chart of METRICS) {
    const metric = view[chart], y = view[`${chart}_y`], traces = shown.flatMap((run, j) => tracesOf(run, columns[j], metric));
    const isEmpty = !traces.some(trace => trace.x.length);
    const range = axisRange(y, isLog), words = shown.length ? "No such numbers yet." : "No run is selected.";
    $(`plot_${chart}`).setAttribute("aria-label", `${metric} over ${scale} of ${shown.map(run => run.name).join(", ") || "no run"}`);
    draw(`plot_${chart}`, [now, metric, y], traces, {
      showlegend: false, annotations: isEmpty ? nothing(words) : [],
      xaxis: { title: { text: scale }, range: axisRange(view.zoom), visible: !isEmpty },
      yaxis: { type: isLog ? "log" : "linear", range, visible: !isEmpty },
    }, event => zoomed(chart, event));
  }
}

// Takes over what a drag over a chart, or a double click, has made of its axes.
function zoomed(chart, event) {
  const now = {};
  const words = (axis, isLog) => event[`${axis}.autorange`] ? "" :
    $(`plot_${chart}`).layout[axis].range.map(end => +(isLog ? 10 ** end : end).toPrecision(6)).join();
  const moved = axis => Object.keys(event).some(key => key.startsWith(`${axis}.`));
  if (moved("xaxis")) now.zoom = words("xaxis");
  if (moved("yaxis")) now[`${chart}_y`] = words("yaxis", view.log);
  if (Object.keys(now).length) change(now);
}

function showTime() {
  const shown = selected().filter(run => Object.values(run.spent).some(Boolean));
  const whole = shown.map(run => Object.values(run.spent).reduce((a, b) => a + b, 0));
  const traces = Object.entries(PARTS).map(([part, [name, fill]]) => ({
    type: "bar", orientation: "h", name, y: shown.map((run, i) => i), x: shown.map((run, i) => 100 * run.spent[part] / whole[i]),
    marker: { color: fill }, customdata: shown.map(run => [plain(run.name), run.spent[part]]),
    hovertemplate: "%{customdata[0]}: %{x:.1f}% " + name + ", %{customdata[1]:,.0f} s<extra></extra>",
  }));
  const words = selected().length ? "No time is measured yet." : "No run is selected.";
  $("time").style.height = `${130 + 30 * shown.length}px`;
  draw("time", [words, shown.map(run => [run.name, run.spent])], traces, {
    barmode: "stack", legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom" }, margin: { l: 55, r: 15, t: 60, b: 35 },
    xaxis: { visible: shown.length > 0, range: [0, 100], ticksuffix: "%", fixedrange: true }, bargap: .35, annotations: shown.length ? [] : nothing(words),
    yaxis: { visible: shown.length > 0, autorange: "reversed", tickvals: shown.map((run, i) => i), ticktext: shown.map(run => plain(run.name)), fixedrange: true },
  });
}

async function showHeat(run) {
  const name = view.by === "load/layer_" ? "layer" : "expert", order = key => +key.slice(view.by.length);
  const keys = (run?.keys ?? []).filter(key => key.startsWith(view.by)).sort((a, b) => order(a) - order(b));
  $("heat").hidden = !keys.length;
  if (!run) return say($("heatwords"), "No run is selected.");
  if (!keys.length) return say($("heatwords"), `${run.name} has no numbers of its experts by ${name}.`);
  say($("heatwords"), `${run.name}: ` + (name === "layer" ? "tokens of the busiest expert of each layer" : "share of the tokens per expert, a mean over layers") + ", in multiples of an even load (1).");
  const every = Math.ceil(run.n / 300), now = [run.name, run.version, view.by, every, Math.floor(run.n / every)];
  if (drawn.get("heat") === JSON.stringify(now)) return;
  const { columns } = await ask("/api/rows", [["run", run.name], ["every", every], ["key", "step"], ...keys.map(key => ["key", key])]);
  const factor = name === "layer" ? 1 : keys.length;
  draw("heat", now, [{
    type: "heatmap", x: columns.step, y: keys.map(key => key.slice(view.by.length)), z: keys.map(key => columns[key].map(v => v === null ? null : v * factor)),
    zmin: name === "layer" ? 1 : 0, colorscale: "Viridis", colorbar: { thickness: 12 },
    hovertemplate: `step %{x}, ${name} %{y}: %{z:.2f}<extra></extra>`,
  }], { xaxis: { title: { text: "steps" } }, yaxis: { type: "category", title: { text: name } } });
}

// --- Beside them

async function showSamples(run) {
  const texts = run ? await ask("/api/samples", [["run", run.name]]) : {};
  const steps = Object.keys(texts).sort((a, b) => b - a);
  const newest = $("sampled").selectedIndex <= 0;
  setOptions($("sampled"), steps, newest ? steps[0] : $("sampled").value);
  $("steps").hidden = !steps.length;
  say($("samples"), texts[$("sampled").value] ?? "No samples yet.");
}

function seconds(x) { return x ? `${x.toPrecision(3)} s` : "–"; }

async function showTables() {
  const shown = selected(), names = shown.map(run => run.name);
  showTable("plan", ["run", "tokens/s", "step, measured", "step, planned"], shown.map(run =>
    [run.name, run.measured ? Math.round(run.tokens / run.measured).toLocaleString("en") : "–", seconds(run.measured), seconds(run.planned)]), "No run is selected.");
  const found = await Promise.all(shown.map(flagsOf));
  for (const kind of ["flags", "machine"]) {
    const words = cell => cell === undefined ? "–" : cell.replace(/^"(.*)"$/, "$1").replace(/([0-9a-f]{12})[0-9a-f]{20,}/, "$1");  // no whole hash
    const rows = differing(found.map(one => one[kind])).map(row => row.map(words));
    showTable(kind, [kind === "flags" ? "flag" : "what", ...names], rows, shown.length > 1 ? "None." : "Select two runs or more.");
  }
}

// --- The view

function showControls() {
  const keys = [...new Set(selected().flatMap(run => run.keys))].sort();
  METRICS.forEach(chart => setOptions($(chart), keys.includes(view[chart]) ? keys : [view[chart], ...keys], view[chart]));
  setOptions($("one"), selected().map(run => run.name), view.one);
  for (const id of ["x", "smooth", "by"]) {
    $(id).value = view[id];
    if (!$(id).value) view[id] = $(id).value = DEFAULTS[id];  // the link named none of its values
  }
  $("log").checked = Boolean(view.log);
  say($("xwords"), $("x").selectedOptions[0].textContent);
  for (const field of document.querySelectorAll("[data-range]"))
    if (field !== document.activeElement) field.value = rangeOf(view[field.dataset.range])?.[field.dataset.end] ?? "";
  $("whole").hidden = !(view.zoom || view.first_y || view.second_y);
}

// Changes what is shown. The address follows: a reload, a bookmark or somebody else's browser shows the same.
function change(now) {
  if (now.x && now.x !== view.x) now.zoom = "";
  for (const chart of METRICS) if (now[chart] && now[chart] !== view[chart]) now[`${chart}_y`] = "";
  view = { ...view, ...now };
  history.replaceState(null, "", `#${linkOf(view)}`);
  openTab();
}

let showing = null, again = false;
// Shows what there is now; a call while another one is at it has it begin once more.
function show() {
  if (showing) again = true;
  return showing ??= (async () => {
    do { again = false; await showOnce(); } while (again);
    showing = null;
  })();
}

async function showOnce() {
  try {
    await readRuns();
    showList();
    showControls();
    const one = selected().find(run => run.name === $("one").value);
    await showCurves();
    showTime();
    await showTables();
    await showHeat(one);
    await showSamples(one);
    say($("state"), `as of ${new Date().toLocaleTimeString()}`);
    say($("trouble"), "");
  } catch (error) {
    say($("trouble"), `not up to date: ${error.message}`);
  }
}

// --- Try

let stopping = null;

// Moves among the tokens with the arrow keys: one of them alone is reached by Tab.
function moveToken(event) {
  const tokens = [...document.querySelectorAll(".token")], at = tokens.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (event.key === "Escape") $("likely").hidden = true;
  if (at < 0 || !tokens[to]) return;
  event.preventDefault();
  tokens[at].tabIndex = -1;
  tokens[to].tabIndex = 0;
  tokens[to].focus();
}

function showToken(text, chance, likely) {
  const token = element("span", text, { className: "token", tabIndex: document.querySelector(".token") ? -1 : 0 });
  token.style.background = `color-mix(in srgb, var(--bad) ${Math.round(Math.min(45, -8 * Math.log(chance)))}%, transparent)`;
  token.setAttribute("aria-describedby", "likely");
  const point = () => {
    const rows = Object.entries(likely).sort((a, b) => b[1] - a[1]).map(([t, p]) => [JSON.stringify(t), percent(Math.exp(p))]);
    const box = token.getClientRects()[0];
    $("likely").replaceChildren(element("b", `${JSON.stringify(text)}: ${percent(chance)}`), table([], rows));
    $("likely").hidden = false;
    $("likely").style.left = `${Math.max(8, Math.min(box.left, innerWidth - $("likely").offsetWidth - 8))}px`;
    const below = box.bottom + 6;
    $("likely").style.top = `${below + $("likely").offsetHeight < innerHeight ? below : box.top - $("likely").offsetHeight - 6}px`;
  };
  token.onpointerenter = token.onfocus = point;
  token.onpointerleave = token.onblur = () => $("likely").hidden = true;
  $("text").append(token);
}

function percent(x) { return `${(100 * x).toFixed(x < .1 ? 2 : 1)}%`; }

function showPiece(data) {
  const piece = JSON.parse(data);
  if (piece.error) throw new Error(piece.error.message);
  const [{ logprobs }] = piece.choices;
  logprobs.tokens.forEach((text, i) => showToken(text, Math.exp(logprobs.token_logprobs[i]), logprobs.top_logprobs[i]));
}

async function complete() {
  if (stopping) return stopping.abort();
  stopping = new AbortController();
  $("go").textContent = "Stop";
  $("said").textContent = "the model is opened at its first prompt…";
  $("text").replaceChildren(element("span", $("prompt").value, { className: "faint" }));
  const wanted = { model: $("model").value, prompt: $("prompt").value, max_tokens: +$("max").value, temperature: +$("temperature").value, seed: +$("seed").value, logprobs: 5, stream: true };
  try {
    const answer = await fetch("/v1/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(wanted), signal: stopping.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part; !(part = await reader.read()).done;) {
      const events = (rest + part.value).split("\n\n");
      rest = events.pop();
      $("said").textContent = "";
      events.map(event => event.slice(6)).filter(data => data !== "[DONE]").forEach(showPiece);
    }
  } catch (error) {
    $("said").textContent = error.name === "AbortError" ? "stopped" : error.message;
  } finally { stopping = null; $("go").textContent = "Continue"; }
}

async function showModels() {
  await readRuns();
  const { data } = await ask("/v1/models"), place = model => runs.findIndex(run => run.name === model.id);
  data.sort((a, b) => place(a) - place(b));
  setOptions($("model"), data.map(model => model.id), view.model);
  const model = data.find(one => one.id === $("model").value);
  const run = runs.find(run => run.name === $("model").value), which = run?.state === "overfit" ? ", the best one, as it overfits" : "";
  say($("sampler"), model ? `It continues the prompt from ${model.owned_by} of ${model.id}${which}.` : "No run has a checkpoint yet.");
  if (run && !$("prompt").value) $("prompt").value = (await flagsOf(run)).flags.prompt ?? "";
}

// --- Both

function openTab() {
  for (const tab of document.querySelectorAll("[data-tab]")) {
    const name = tab.dataset.tab;
    tab.href = `#${linkOf({ ...view, tab: name })}`;
    view.tab === name ? tab.setAttribute("aria-current", "page") : tab.removeAttribute("aria-current");
    $(name).hidden = view.tab !== name;
  }
  if (view.tab === "try") say($("state"), "");
  (view.tab === "try" ? showModels() : show()).catch(error => say($("trouble"), error.message));
}

function readAddress() {
  view = viewOf(location.hash.slice(1));
  if (view.tab !== "try") view.tab = "runs";
  openTab();
}

for (const id of ["x", "smooth", "one", "by", "model", ...METRICS]) $(id).addEventListener("change", () => change({ [id]: $(id).value }));
$("log").addEventListener("change", () => change({ log: $("log").checked ? "1" : "" }));
$("sampled").addEventListener("change", show);
$("all").onclick = () => change({ runs: "all", run: null });
$("none").onclick = () => change({ runs: "", run: [] });
$("whole").onclick = () => change({ zoom: "", first_y: "", second_y: "" });
for (const field of document.querySelectorAll("[data-range]")) field.addEventListener("change", () => {
  const both = [...document.querySelectorAll(`[data-range=${field.dataset.range}]`)].map(one => one.value);
  change({ [field.dataset.range]: both.some(Boolean) ? both.join() : "" });
});
$("go").onclick = complete;
$("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !stopping) complete();
});
$("text").addEventListener("keydown", moveToken);
addEventListener("hashchange", readAddress);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawn.clear(); show(); });
setInterval(() => { if (!document.hidden && view.tab === "runs") show(); }, 3000);
readAddress();
