// Runs the scripts of tools/page.html against a page at argv[2] with a document that only remembers, and prints as JSON
// what it shows: all runs, and after that none.
const address = process.argv[2];

class Element {
  constructor(name) { Object.assign(this, { name, children: [], dataset: {}, style: {}, value: "", textContent: "" }); }
  get options() { return this.children; }
  get selectedOptions() { return [this.children.find(child => child.value === this.value) ?? new Element("option")]; }
  get selectedIndex() { return this.children.findIndex(child => child.value === this.value); }
  get text() { return this.textContent + this.children.map(child => child.text ?? child).join("|"); }
  append(...children) { this.children.push(...children); }
  insertBefore(child, next) { this.children.splice(next ? this.children.indexOf(next) : this.children.length, 0, child); }
  replaceChildren(...children) { this.children = children; }
  addEventListener() {}
  setAttribute() {}
  removeAllListeners() {}
  on() {}
}

const known = new Map();
const get = id => known.get(id) ?? known.set(id, new Element(id)).get(id);
const drawn = [];
Object.assign(globalThis, {
  document: { getElementById: get, createElement: name => new Element(name), documentElement: null, querySelectorAll: () => [] },
  getComputedStyle: () => ({ getPropertyValue: () => "" }), matchMedia: () => new Element(),
  location: { hash: "#runs=all&first=loss%2Ftrain_loss&second=lr" }, history: { replaceState() {} }, addEventListener() {}, setInterval() {},
  Plotly: { react: (id, traces) => drawn.push([id, traces.map(({ name, x }) => [name, x.length])]) },
});
const before = Object.getOwnPropertyNames(Object.prototype).length;
const there = globalThis.fetch;
globalThis.fetch = (path, settings) => there(address + path, settings);

const now = () => Object.fromEntries(["list", "count", "plan", "flags", "state", "trouble", "heatwords"].map(id => [id, get(id).text]));

(async () => {
  const page = await (await there(address)).text();
  const paths = [...page.matchAll(/<script src="(\/page[^"]*)">/g)].map(found => found[1]);
  const scripts = await Promise.all(paths.map(async path => (await there(address + path)).text()));
  const shown = new Function(`${scripts.join("\n")}; return { show, change };`)();
  await shown.show();
  const all = now(), cards = [...get("list").children];
  await shown.show();
  const stays = cards.length > 0 && cards.every((card, i) => card === get("list").children[i]);
  shown.change({ runs: "", run: [] });
  await shown.show();
  const polluted = Object.getOwnPropertyNames(Object.prototype).length - before;
  console.log(JSON.stringify({ ...all, none: now(), hidden: get("heat").hidden, stays, drawn, polluted }));
})();
