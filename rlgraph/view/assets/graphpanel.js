// The panel of the graph: what is drawn of it, and the tools above it.

class GraphPanel {
  constructor(contents, pick) {
    Object.assign(this, { contents, pick, views: {}, frame: el("div", { class: "frame" }), said: el("span", { class: "note", role: "status" }) });
    const phases = Object.keys(contents.phases).map((phase) => [phase, phase === "train" ? "training" : "evaluation"]);
    this.inserted = toggle("inserted steps", innerWidth >= NARROW, "show what rlgraph inserted (i)", (on) => this.redraw("inserted", on));
    this.types = toggle("types", false, "types on edges (t)", (on) => this.redraw("types", on));
    const regions = Object.values(contents.phases).some(({ steps }) => steps.some((step) => step.region));
    this.pools = this.folder("pool", "fold pools", "draw each pool as one box (p)", Object.keys(contents.pools).length > 1);
    this.regions = this.folder("region", "fold regions", "draw what is repeated until enough rows stay as one box (r)", regions);
    this.element = el(
      "section", { class: "panel", id: "panel-graph" },
      el(
        "div", { class: "bar-of-tools" }, phases.length > 1 ? choice("phase", phases, "train", (phase) => this.open(phase)) : null, this.inserted, this.types,
        button("fold", { title: "fold what leads to the picked step alone, or unfold it (f); a double click does it too" }, () => this.fold()), this.pools, this.regions,
        el("span", { class: "choice" }, ...[["−", 0.8], ["+", 1.25]].map(([text, factor]) => button(text, { "aria-label": `zoom ${text}` }, () => this.graph.navigation.zoom(factor))), button("fit", {}, () => this.graph.navigation.fit())),
        this.said,
      ),
      this.frame,
    );
    this.open("train");
  }

  open(phase) {
    this.phase = phase;
    const folding = { fold: (step) => this.fold(step), foldAll: (fold) => this.refold([fold, ...this.graph.folds]) };
    this.views[phase] = this.views[phase] || new GraphView({ ...this.contents.phases[phase], pools: this.contents.pools, select: this.pick, inserted: innerWidth >= NARROW, ...folding });
    this.graph = this.views[phase];
    for (const [name, made] of [["inserted", this.inserted], ["types", this.types]]) made.setAttribute("aria-pressed", String(this.graph[name]));
    this.pressed();
    this.frame.replaceChildren(this.graph.svg);
    this.say();
    this.shown();
  }

  shown() {
    this.graph.navigation.fit(0.6);
  }

  say(text) {
    const { steps } = this.contents.phases[this.phase];
    const count = steps.filter((step) => step.inserted).length;
    const often = this.phase === "train" ? "per iteration" : "per evaluation";
    const look = this.graph.inserted ? "dashed" : "hidden";
    const devices = Object.entries(this.contents.pools).map(([pool, size]) => `${devicesText(size)} in ${pool}`).join(", ");
    this.said.textContent = text || `${steps.length} steps ${often} on ${devices}; ${count} of the steps inserted (${look})`;
  }

  redraw(what, value) {
    this.graph[what] = value;
    this.graph.draw();
    this.shown();
    this.say();
  }

  // A button that folds all pools, or all regions.
  folder(kind, text, title, there) {
    const made = toggle(text, false, title, (on) => {
      const names = new Set(this.graph.steps.map((step) => step[kind]).filter(Boolean));
      const others = this.graph.folds.filter((fold) => !fold[kind]);
      this.refold(on ? [...[...names].map((name) => ({ [kind]: name })), ...others] : others);
    });
    made.hidden = !there;
    return made;
  }

  refold(folds) {
    this.redraw("folds", folds);
    this.pressed();
  }

  // Which buttons are down: those of what is folded.
  pressed() {
    for (const [kind, made] of [["pool", this.pools], ["region", this.regions]]) made.setAttribute("aria-pressed", String(this.graph.folds.some((fold) => fold[kind])));
  }

  // Fold what leads to a step alone, or unfold a box; the one that is picked unless another is given.
  fold(step = this.current) {
    const { folds } = this.graph;
    if (!step) return this.say("Pick a step first: what leads to it alone is folded into it.");
    const drawn = () => (this.graph.nodes.get(this.graph.at(step.id)) || {}).step;
    const box = drawn();
    if (box && box.inside) return this.refold(folds.filter((fold) => fold !== box.fold));
    this.refold([{ step: step.id }, ...folds]);
    const made = drawn();
    if (made && made.inside) {
      this.pick("step", made);
      return this.shown(); // its details have made the frame narrower
    }
    this.graph.folds = folds;
    return this.say(`Nothing leads to ${step.title} alone.`);
  }

  // From step to step in their order.
  step(by) {
    const shown = [...this.graph.nodes.values()].map((node) => node.step);
    const at = this.current ? shown.findIndex((step) => step.id === this.graph.at(this.current.id)) + by : by > 0 ? 0 : shown.length - 1;
    if (shown[at]) this.pick("step", shown[at], true);
  }
}
