// What tools/page.js shows, as far as it needs no document: the view and its link, colors, curves.
"use strict";
const COLORS = 12;  // how many --runN there are in page.css
const MOST = 10;  // runs that are shown before anybody selects some
// What is shown, as a link says it. runs: "all", or the names in `run`; neither: the newest MOST. zoom and y: "FROM,TO".
const DEFAULTS = {
  tab: "runs", runs: "", run: null, x: "step", smooth: "0", log: "", first: "loss/train_cross_entropy_loss",
  second: "loss/val_cross_entropy_loss", zoom: "", first_y: "", second_y: "", one: "", by: "load/layer_", model: "",
};

// A link's part after the # for a view: what differs from DEFAULTS.
function linkOf(view) {
  const found = new URLSearchParams();
  for (const [key, value] of Object.entries(view))
    if (key === "run") (value?.length ? value : value ? [""] : []).forEach(name => found.append("run", name));
    else if (value !== DEFAULTS[key]) found.set(key, value);
  return found.toString();
}

function viewOf(link) {
  const given = new URLSearchParams(link), found = { ...DEFAULTS };
  for (const key of Object.keys(DEFAULTS))
    if (key === "run") found.run = given.has("run") ? given.getAll("run").filter(Boolean) : null;
    else if (given.has(key)) found[key] = given.get(key);
  return found;
}

// [from, to] of "FROM,TO", null for an end that is missing; null where it says nothing.
function rangeOf(words) {
  const ends = words.split(",");
  const [from, to] = [0, 1].map(i => ends[i]?.trim() && Number.isFinite(+ends[i]) ? +ends[i] : null);
  if (from === null && to === null) return null;
  return from !== null && to !== null && from >= to ? null : [from, to];
}

function hash(words) {  // FNV-1a
  let found = 0x811c9dc5;
  for (const letter of words) found = Math.imul(found ^ letter.codePointAt(0), 0x01000193) >>> 0;
  return (found ^ found >>> 16) >>> 0;
}

// {run: number of its color} of all runs. Each has the first color, in an order that its name makes, that no run has
// which started before it: a new run changes no other's. From COLORS on the numbers are those below it, otherwise dashed.
function slotsOf(runs) {
  const began = run => run.started ?? Infinity;
  const oldest = [...runs].sort((a, b) => began(a) - began(b) || (a.name < b.name ? -1 : 1));
  const found = new Map(), taken = new Set(), colors = [...Array(COLORS).keys()];
  for (const { name } of oldest) {
    const order = colors.map(n => [hash(n + name), n]).sort(([a], [b]) => a - b).map(([, n]) => n);
    const slot = n => n - n % COLORS + order[n % COLORS];
    let n = 0;
    while (taken.has(slot(n))) n++;
    taken.add(slot(n));
    found.set(name, slot(n));
  }
  return found;
}

// Exponential means of values at steps, over about `over` steps: each counts e times less than one so many steps later.
function smooth(steps, values, over) {
  let sum = 0, weight = 0;
  return values.map((value, i) => {
    const stays = i ? Math.exp((steps[i - 1] - steps[i]) / over) : 0;
    sum = stays * sum + (1 - stays) * value;
    weight = stays * weight + 1 - stays;
    return sum / weight;
  });
}

// Of many points the lowest and the highest of each of so many parts, and the ends: a line through them looks the same.
function thin(values, most) {
  const every = Math.ceil(2 * values.length / most), found = new Set();
  if (every <= 2) return values.map((value, i) => i);
  found.add(0);
  for (let first = 0; first < values.length; first += every) {
    let low = first, high = first;
    for (let i = first; i < Math.min(first + every, values.length); i++) {
      if (values[i] < values[low]) low = i;
      if (values[i] > values[high]) high = i;
    }
    found.add(Math.min(low, high)).add(Math.max(low, high));
  }
  return [...found.add(values.length - 1)];
}

// The numbers of the points of rising x in a range, and of one on each side, to which lines lead.
function within(x, range) {
  if (!range) return [0, x.length];
  const first = x.findIndex(one => one >= (range[0] ?? -Infinity)), last = x.findLastIndex(one => one <= (range[1] ?? Infinity));
  return first < 0 ? [x.length, x.length] : [Math.max(0, first - 1), Math.min(x.length, last + 2)];
}

// Rows [name, value of each run] of the names whose values differ; undefined where a run has none.
function differing(each) {
  const names = [...new Set(each.flatMap(Object.keys))].sort();
  return names.map(name => [name, ...each.map(values => Object.hasOwn(values, name) ? JSON.stringify(values[name]) : undefined)])
    .filter(([, first, ...others]) => others.some(value => value !== first));
}
