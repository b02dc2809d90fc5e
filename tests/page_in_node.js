// Runs the script of tools/page.html against a page at argv[2] with a document that only remembers, and prints what its
// list and its tables show, as JSON.
const address = process.argv[2];

class Element {
  constructor(name) { Object.assign(this, { name, children: [], dataset: {}, style: {}, value: "", textContent: "" }); }
  get options() { return this.children; }
  get selectedOptions() { return [this.children.find(child => child.value === this.value) ?? new Element("option")]; }
  get selectedIndex() { return this.children.findIndex(child => child.value === this.value); }
  get text() { return this.textContent + this.children.map(child => child.text ?? child).join("|"); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  addEventListener() {}
  setAttribute() {}
}

const known = new Map();
const get = id => known.get(id) ?? known.set(id, new Element(id)).get(id);
const metrics = ["loss/train_loss", "lr"].map(wanted => Object.assign(new Element("select"), { dataset: { wanted } }));
const drawn = [];
Object.assign(globalThis, {
  document: {
    getElementById: get, createElement: name => new Element(name), documentElement: null,
    querySelectorAll: words => words === ".metric" ? metrics : [],
  },
  getComputedStyle: () => ({ getPropertyValue: () => "" }), matchMedia: () => new Element(),
  location: { hash: "" }, addEventListener() {}, setInterval() {},
  Plotly: { react: (id, traces) => drawn.push([id, traces.map(({ name, x }) => [name, x.length])]) },
});
const before = Object.getOwnPropertyNames(Object.prototype).length;
const there = globalThis.fetch;
globalThis.fetch = (path, settings) => there(address + path, settings);
get("x").value = "step";

(async () => {
  const page = await (await there(address)).text();
  const script = page.split("<script>")[1].split("</script>")[0];
  await new Function(`${script}; return new Promise(done => setTimeout(async () => { await show(); done(); }, 1500));`)();
  const polluted = Object.getOwnPropertyNames(Object.prototype).length - before;
  const shown = Object.fromEntries(["list", "plan", "flags", "state"].map(id => [id, get(id).text]));
  console.log(JSON.stringify({ ...shown, drawn, polluted }));
})();
