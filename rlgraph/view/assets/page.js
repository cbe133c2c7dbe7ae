// The page: its panels, the search, the keyboard.

const KEYS = [
  ["/", "search; Enter goes on to the next"], ["i", "show or hide inserted steps"], ["t", "types on edges"],
  ["f", "fold what leads to a step alone, or unfold"], ["p r", "fold or unfold the pools, the regions"], ["a", "arrows between the steps of the plan"],
  ["c", "the next column to colour tokens by"], ["+ - 0", "zoom in, out, fit"],
  ["arrows", "from step to step"], ["Enter", "pick"], ["Escape", "clear"], ["d", "light or dark"], ["?", "this list"],
];

class Page {
  constructor(contents) {
    this.contents = contents;
    this.pick = (...picked) => this.select(...picked);
    this.detail = el("aside", { id: "detail", "aria-live": "polite", hidden: true });
    this.panels = this.makePanels();
    this.tabs = el("nav", { role: "tablist", "aria-label": "panels" }, ...Object.keys(this.panels).map((name, n) => this.tab(name, n)));
    this.search = el("input", { type: "search", id: "search", placeholder: "search  /", title: "steps, ops, columns, models (/)", "aria-label": "search", list: "names", oninput: () => this.find(this.search.value), onkeydown: (event) => event.key === "Enter" && this.next(event.shiftKey ? -1 : 1) });
    this.said = el("small", { role: "status" }, contents.follow ? "following" : "");
    this.help = el("dialog", { id: "help" }, el("h2", null, "Keys"), facts([...Object.keys(this.panels).map((name, n) => [String(n + 1), `the panel ${name}`]), ...KEYS]), button("close", {}, () => this.help.close()));
    document.body.append(...[this.header(), this.headline()].filter(Boolean), el("main", null, ...Object.values(this.panels).map((panel) => panel.element), this.detail), this.names(), this.help);
    document.addEventListener("keydown", (event) => this.key(event));
    this.goTo(location.hash.slice(1));
  }

  // Where an address leads: a panel, or a part of one, as #samples.
  goTo(asked) {
    const { run, diff } = this.contents;
    const part = document.querySelector(`h2[id="${CSS.escape(asked)}"]`);
    const [name, panel] = Object.entries(this.panels).find(([, one]) => part && one.element.contains(part)) || [];
    this.open(asked in this.panels ? asked : name || (diff ? "diff" : run ? "run" : "graph"));
    if (panel) panel.draw();
    if (panel) part.scrollIntoView();
  }

  header() {
    const { contents } = this;
    const compared = contents.run && contents.diff ? `${contents.diff.new} against ${contents.diff.old}` : contents.run && contents.run.name;
    const words = [compared, contents.about].filter(Boolean).join(" — ");
    return el(
      "header", { id: "head" },
      el("h1", null, contents.graph, el("small", null, words)), this.tabs,
      el("span", { class: "tools" }, this.said, this.search, button("◐", { title: "light or dark (d)", "aria-label": "light or dark" }, () => this.theme()), button("?", { title: "keys (?)", "aria-label": "keys" }, () => this.help.showModal())),
    );
  }

  // What one decides by, above all panels: what was measured of a run and of the one that it is compared with, and what
  // is predicted of the plan.
  headline() {
    const { headline, open, run, diff } = this.contents;
    const [on, figures] = headline || [];
    const measured = (run && run.outcome) || {};
    const compared = (diff && diff.outcome) || {};
    const both = Object.keys(measured).length > 0 && Object.keys(compared).length > 0;
    const shown = [
      ...Object.entries(measured).map(([label, text]) => [both ? `${label}: ${diff.new}` : label, text]), ...Object.entries(compared).map(([label, text]) => [`${label}: ${diff.old}`, text]),
      ...Object.entries(figures || {}).map(([label, text]) => [run ? `${label}, predicted` : label, text]),
      ["still open", open.join(", ")],
    ].filter(([, text]) => text);
    if (!shown.length) return null;
    const texts = [
      both ? `${diff.new}: ${outcomeText(measured, true)}` : outcomeText(measured), both && `${diff.old}: ${outcomeText(compared, true)}`,
      on && `${on}: ${figures.iteration} per iteration`, open.length && `still open: ${open.join(", ")}`,
    ];
    const text = texts.filter(Boolean).join("; ");
    if (shown.length > 1 || !open.length) return headlineElement(text, shown);
    return el("section", { id: "headline", "aria-label": "headline" }, el("p", { class: "note" }, text));
  }

  makePanels() {
    const { contents } = this;
    const found = { graph: new GraphPanel(contents, this.pick), plan: new PlanPanel(contents, this.pick) };
    if (contents.diff) found.diff = new DiffPanel(contents, this.pick);
    if (contents.run) found.run = new RunPanel(contents, this.pick);
    return found;
  }

  get graph() {
    return this.panels.graph.graph;
  }

  get phase() {
    return this.panels.graph.phase;
  }

  tab(name, n) {
    return button(name[0].toUpperCase() + name.slice(1), { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, title: `${n + 1}` }, () => this.choose(name));
  }

  // Open a panel and name it in the address, so that links and the back button lead to it.
  choose(name) {
    this.open(name);
    location.hash = name;
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
    const rank = (step) => [step.title, step.node].some((name) => name.toLowerCase() === wanted) ? 0 : has(step.title) || has(step.node) ? 1 : 2;
    found.sort((a, b) => rank(a) - rank(b)); // by name first, then by what they read, write and run
    Object.assign(this, { found, at: -1 });
    this.panels.graph.say(`${found.length} steps found${found.length > 1 ? "; Enter goes from one to the next" : ""}`);
    if (exact) return this.select("step", exact, true);
    if (column) return this.select("column", column);
    this.graph.pick({ nodes: ids, edges: (link) => link.columns.some(has) }, null);
    if (found.length === 1) this.select("step", found[0], true);
    return null;
  }

  // From what a search found to the next of it, or to the one before.
  next(by) {
    const count = (this.found || []).length;
    if (!count) return;
    this.at = this.at < 0 && by < 0 ? count - 1 : (this.at + by + count) % count;
    this.select("step", this.found[this.at], true);
  }

  select(kind, what, move) {
    const made = { step: what.inside ? foldDetail : stepDetail, column: columnDetail, model: modelDetail }[kind];
    const phase = kind === "step" ? what.phase : this.phase;
    this.detail.replaceChildren(button("×", { class: "close", "aria-label": "close" }, () => this.clear()), ...made(this.contents, phase, what, this.pick).flat().filter(Boolean));
    this.detail.hidden = false;
    this.detail.scrollTop = 0;
    this.panels.graph.current = kind === "step" ? what : null;
    for (const graph of [this.graph, this.panels.diff && this.panels.diff.graph].filter(Boolean)) {
      const lit = kind === "step" ? graph.around(what) : kind === "column" ? graph.life(what) : graph.users(what);
      graph.pick(lit.nodes.size > 0 && lit, kind === "step" ? what.id : null);
    }
    const narrow = this.detail.offsetWidth > innerWidth * 0.9; // where the details cover the lower half
    if (kind === "step" && (move || narrow)) this.graph.show(what.id, narrow ? 0.2 : 0.5);
    if (kind === "step" && move) this.panels.plan.show(what);
  }

  clear() {
    this.detail.hidden = true;
    this.panels.graph.current = null;
    Object.assign(this, { found: [], at: -1 });
    this.search.value = "";
    this.panels.graph.say();
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
    if (panel) this.choose(panel);
    else if (zoom) this.graph.navigation.zoom(zoom);
    else if (by && !this.panels.graph.element.hidden) this.panels.graph.step(by);
    else if (event.key in this.commands()) this.commands()[event.key]();
    else return;
    event.preventDefault();
  }

  commands() {
    const { graph, plan, run } = this.panels;
    return {
      "/": () => this.search.focus(), i: () => graph.inserted.click(), t: () => graph.types.click(), f: () => graph.fold(), p: () => graph.pools.click(), r: () => graph.regions.click(),
      a: () => plan.all.click(), c: () => run && run.samples.next(), 0: () => graph.shown(), d: () => this.theme(), "?": () => this.help.showModal(),
    };
  }

  renewRun({ run, diff }) {
    const old = this.panels.run;
    const scrolled = old.element.scrollTop;
    this.contents.run = run;
    const headline = this.headline();
    const shown = document.getElementById("headline");
    if (shown) shown.remove();
    if (headline) document.getElementById("head").after(headline);
    if (diff && this.panels.diff.charts) this.panels.diff.charts.renew(diff.curves);
    this.panels.run = new RunPanel(this.contents, this.pick, old.kept());
    this.panels.run.element.hidden = old.element.hidden;
    old.element.replaceWith(this.panels.run.element);
    this.panels.run.draw();
    this.panels.run.element.scrollTop = scrolled;
  }

  // Whether the server that is followed has answered.
  live(answered) {
    this.said.textContent = answered ? `as of ${new Date().toLocaleTimeString()}` : "the server is gone";
  }

  theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    for (const panel of [this.panels.run, this.panels.diff].filter(Boolean)) panel.draw();
  }
}

// Where the page comes from a server that follows a run, newer contents replace what is shown, but for what
// someone is writing.
let latest = "";

async function update(address) {
  const answer = await fetch(address).catch(() => null);
  page.live(answer && answer.ok);
  if (!answer || !answer.ok || document.activeElement.matches("main input")) return;
  const text = await answer.text();
  if (text !== latest) renew(JSON.parse(text));
  latest = text;
}

function follow(address) {
  update(address).finally(() => setTimeout(follow, 3000, address));
}

// Of the same plan only the run is drawn anew.
function renew(contents) {
  const same = (part) => JSON.stringify(contents[part]) === JSON.stringify(page.contents[part]);
  if (contents.run && page.panels.run && same("phases") && same("timeline")) page.renewRun(contents);
  else start(contents);
}

function start(contents) {
  const asked = document.querySelector("[role=tab][aria-selected=true]");
  if (asked) history.replaceState(null, "", `#${asked.id.replace("tab-", "")}`);
  for (const child of [...document.body.children]) if (!child.matches("script, noscript")) child.remove();
  window.page = new Page(contents);
}

addEventListener("hashchange", () => page.goTo(location.hash.slice(1)));
const given = JSON.parse(document.getElementById("contents").textContent);
start(given);
if (given.follow) setTimeout(follow, 3000, given.follow);
