// The page: its panels, the search, the keyboard.

const KEYS = [
  ["1 2 3 4", "the panels"], ["/", "search"], ["i", "show or hide inserted steps"], ["t", "types on edges"], ["+ - 0", "zoom in, out, fit"],
  ["arrows", "from step to step"], ["Enter", "pick"], ["Escape", "clear"], ["d", "light or dark"], ["?", "this list"],
];

class Page {
  constructor(contents) {
    this.contents = contents;
    this.phase = "train";
    this.pick = (kind, what) => this.select(kind, what);
    this.detail = el("aside", { id: "detail", "aria-live": "polite", hidden: true });
    this.panels = this.makePanels();
    this.tabs = el("nav", { role: "tablist", "aria-label": "panels" }, ...Object.keys(this.panels).map((name, n) => this.tab(name, n)));
    this.search = el("input", { type: "search", id: "search", placeholder: "search steps, columns, models  /", "aria-label": "search", list: "names", oninput: () => this.find(this.search.value) });
    this.help = el("dialog", { id: "help" }, el("h2", null, "Keys"), facts(KEYS), button("close", {}, () => this.help.close()));
    document.body.append(this.header(), el("main", null, ...Object.values(this.panels).map((panel) => panel.element), this.detail), this.names(), this.help);
    document.addEventListener("keydown", (event) => this.key(event));
    const asked = location.hash.slice(1);
    this.open(asked in this.panels ? asked : contents.run ? "run" : contents.diff ? "diff" : "graph");
  }

  header() {
    const { contents } = this;
    const words = [contents.run && contents.run.name, contents.about].filter(Boolean).join(" — ");
    return el(
      "header", { id: "head" },
      el("h1", null, contents.graph, el("small", null, words)), this.tabs,
      el("span", { class: "tools" }, this.search, button("◐", { title: "light or dark (d)", "aria-label": "light or dark" }, () => this.theme()), button("?", { title: "keys (?)", "aria-label": "keys" }, () => this.help.showModal())),
    );
  }

  makePanels() {
    const { contents } = this;
    const found = { graph: this.graphPanel(), plan: new PlanPanel(contents, this.pick) };
    if (contents.diff) found.diff = new DiffPanel(contents, this.pick);
    if (contents.run) found.run = new RunPanel(contents, this.pick);
    return found;
  }

  graphPanel() {
    const frame = el("div", { class: "frame" });
    const views = {};
    const show = (phase) => {
      this.phase = phase;
      const found = this.contents.phases[phase];
      views[phase] = views[phase] || new GraphView({ ...found, pools: this.contents.pools, select: this.pick });
      this.graph = views[phase];
      frame.replaceChildren(this.graph.svg);
      this.graph.navigation.fit();
    };
    this.insertedToggle = toggle("inserted steps", true, "show what rlgraph inserted (i)", (on) => this.redraw("inserted", on));
    this.typesToggle = toggle("types", false, "types on edges (t)", (on) => this.redraw("types", on));
    const phases = Object.keys(this.contents.phases).map((phase) => [phase, phase === "train" ? "training" : "evaluation"]);
    const bar = el(
      "div", { class: "bar-of-tools" }, phases.length > 1 ? choice("phase", phases, "train", show) : null, this.insertedToggle, this.typesToggle,
      el("span", { class: "choice" }, ...[["−", 0.8], ["+", 1.25]].map(([text, factor]) => button(text, { "aria-label": `zoom ${text}` }, () => this.graph.navigation.zoom(factor))), button("fit", {}, () => this.graph.navigation.fit())),
      el("span", { class: "note" }, this.summary()),
    );
    const panel = { element: el("section", { class: "panel", id: "panel-graph" }, bar, frame), shown: () => this.graph.navigation.fit() };
    show("train");
    return panel;
  }

  summary() {
    const { steps } = this.contents.phases.train;
    const count = steps.filter((step) => step.inserted).length;
    return `${steps.length} steps an iteration, ${count} of them inserted (dashed)`;
  }

  redraw(what, on) {
    this.graph[what] = on;
    this.graph.draw();
    this.graph.navigation.fit();
  }

  tab(name, n) {
    return button(name[0].toUpperCase() + name.slice(1), { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, title: `${n + 1}` }, () => this.open(name));
  }

  open(name) {
    for (const [other, panel] of Object.entries(this.panels)) {
      panel.element.hidden = other !== name;
      document.getElementById(`tab-${other}`).setAttribute("aria-selected", String(other === name));
    }
    if (this.panels[name].shown) this.panels[name].shown();
  }

  names() {
    const { steps, columns } = this.contents.phases.train;
    const found = new Set([...steps.map((step) => step.title), ...Object.keys(columns), ...Object.keys(this.contents.models)]);
    return el("datalist", { id: "names" }, ...[...found].slice(0, 500).map((name) => el("option", { value: name })));
  }

  // What a search finds is lit; an exact name, or the only one found, is picked.
  find(text) {
    const { steps, columns } = this.contents.phases[this.phase];
    const wanted = text.trim().toLowerCase();
    if (!wanted) return this.clear();
    const has = (name) => name.toLowerCase().includes(wanted);
    const found = steps.filter((step) => [step.title, step.node, step.op, ...step.reads, ...step.writes, ...Object.keys(step.models)].some(has));
    const exact = steps.find((step) => [step.title, step.node].some((name) => name.toLowerCase() === wanted));
    const column = Object.keys(columns).find((name) => name.toLowerCase() === wanted);
    const ids = new Set(found.map((step) => step.id));
    if (exact) return this.select("step", exact, true);
    if (column) return this.select("column", column);
    this.graph.pick({ nodes: ids, edges: (link) => link.columns.some(has) }, null);
    if (found.length === 1) this.select("step", found[0], true);
    return null;
  }

  select(kind, what, move) {
    const made = { step: stepDetail, column: columnDetail, model: modelDetail }[kind];
    const phase = kind === "step" ? what.phase : this.phase;
    this.detail.replaceChildren(button("×", { class: "close", "aria-label": "close" }, () => this.clear()), ...made(this.contents, phase, what, this.pick).flat().filter(Boolean));
    this.detail.hidden = false;
    this.detail.scrollTop = 0;
    this.current = kind === "step" ? what : null;
    for (const graph of [this.graph, this.panels.diff && this.panels.diff.graph].filter(Boolean)) {
      const lit = kind === "step" ? graph.around(what) : kind === "column" ? graph.life(what) : graph.users(what);
      graph.pick(lit.nodes.size > 0 && lit, kind === "step" ? what.id : null);
    }
    const narrow = this.detail.offsetWidth > innerWidth * 0.9; // where the details cover the lower half
    if (kind === "step" && (move || narrow)) this.graph.show(what.id, narrow ? 0.2 : 0.5);
  }

  clear() {
    this.detail.hidden = true;
    this.current = null;
    this.search.value = "";
    this.graph.pick(null, null);
    if (this.panels.diff) this.panels.diff.graph.pick(null, null);
  }

  key(event) {
    if (event.key === "Escape") {
      this.clear();
      document.activeElement.blur();
    }
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const zoom = { "+": 1.25, "=": 1.25, "-": 0.8 }[event.key];
    const by = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    const panel = Object.keys(this.panels)[Number(event.key) - 1];
    if (panel) this.open(panel);
    else if (zoom) this.graph.navigation.zoom(zoom);
    else if (by && !this.panels.graph.element.hidden) this.step(by);
    else if (event.key in this.commands()) this.commands()[event.key]();
    else return;
    event.preventDefault();
  }

  commands() {
    return {
      "/": () => this.search.focus(), i: () => this.insertedToggle.click(), t: () => this.typesToggle.click(), 0: () => this.graph.navigation.fit(),
      d: () => this.theme(), "?": () => this.help.showModal(),
    };
  }

  step(by) {
    const shown = [...this.graph.nodes.values()].map((node) => node.step);
    const at = this.current ? shown.findIndex((step) => step.id === this.current.id) + by : by > 0 ? 0 : shown.length - 1;
    if (shown[at]) this.select("step", shown[at], true);
  }

  theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    if (this.panels.run) this.panels.run.draw();
  }
}

// Where the page comes from a server that follows a run, newer contents replace what is shown, but for what
// someone is reading.
let latest = "";

async function update(address) {
  const answer = await fetch(address);
  const text = answer.ok ? await answer.text() : latest;
  if (text === latest || !document.getElementById("detail").hidden) return;
  latest = text;
  start(JSON.parse(text));
}

function follow(address) {
  update(address).finally(() => setTimeout(follow, 3000, address));
}

function start(contents) {
  const asked = document.querySelector("[role=tab][aria-selected=true]");
  const panel = document.querySelector(".panel:not([hidden])");
  const scrolled = panel && panel.scrollTop;
  if (asked) history.replaceState(null, "", `#${asked.id.replace("tab-", "")}`);
  for (const child of [...document.body.children]) if (!child.matches("script, noscript")) child.remove();
  window.page = new Page(contents);
  if (scrolled) document.querySelector(".panel:not([hidden])").scrollTop = scrolled;
}

const given = JSON.parse(document.getElementById("contents").textContent);
start(given);
if (given.follow) setTimeout(follow, 3000, given.follow);
