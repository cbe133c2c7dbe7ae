// Two graphs: the edits that make the one of the other, and both in one picture. Of two runs also their curves.

class DiffPanel {
  constructor(contents, pick) {
    const { diff } = contents;
    const lines = (title, found, none) => [el("h2", null, title), found.length ? el("ul", { class: "edits" }, ...found) : el("p", { class: "note" }, none)];
    const edits = diff.edits.map(([word, text]) => el("li", { class: `edit-${word}` }, el("b", null, word), ` ${text}`));
    this.graph = new GraphView({ ...union(contents), select: pick, inserted: innerWidth >= NARROW });
    this.charts = diff.curves.length ? new Charts(diff.curves) : null;
    const marks = [["added", "added"], ["removed", "removed"], ["changed", "changed"]].map(([kind, text]) => el("span", null, el("i", { class: `swatch ${kind}` }), text));
    this.element = el(
      "section", { class: "panel", id: "panel-diff" },
      el("p", null, "From ", el("b", null, diff.old), " to ", el("b", null, diff.new), "."),
      ...(this.charts ? [el("h2", { id: "curves" }, "Curves"), ...this.charts.head, this.charts.element] : []),
      ...lines("Edits", edits, "The graphs are the same."),
      el("p", { class: "legend" }, ...marks), el("div", { class: "frame" }, this.graph.svg),
      ...lines("What the plan does otherwise", diff.plan.map((line) => el("li", null, line)), "Nothing."),
    );
    onNewWidth(this.element, () => this.draw());
  }

  draw() {
    if (this.charts) this.charts.draw();
  }

  shown() {
    this.draw();
    this.graph.navigation.fit(0.6);
  }
}

// The new graph with what was removed from the old one; nodes are the same where their names are.
function union(contents) {
  const { diff } = contents;
  const train = contents.phases.train;
  const ids = new Map(train.steps.map((step) => [step.node, step.id]));
  const before = new Map(diff.before.steps.map((step) => [step.id, step]));
  const gone = diff.before.steps.filter((step) => diff.status[step.node] === "removed").map((step) => ({ ...step, id: `old ${step.id}` }));
  for (const step of gone) ids.set(step.node, step.id);
  const ends = ({ source, target }) => [before.get(source).node, before.get(target).node];
  const [now, then] = [train.links.map((link) => `${link.source} ${link.target}`), diff.before.links.map((link) => ends(link).map((node) => ids.get(node)).join(" "))];
  const kept = train.links.map((link, n) => (then.includes(now[n]) ? link : { ...link, status: "added" }));
  const old = diff.before.links.filter((_, n) => !now.includes(then[n])).map((link) => {
    const [source, target] = ends(link).map((node) => ids.get(node));
    return { ...link, source, target, status: "removed" };
  });
  const pools = Object.fromEntries([...train.steps, ...gone].map((step) => [step.pool, contents.pools[step.pool] || 0]));
  return {
    steps: [...train.steps, ...gone], links: acyclic([...kept, ...old]), columns: train.columns, weights: [],
    pools: Object.keys(pools).length > 1 && gone.length ? { both: 0 } : pools, status: diff.status,
  };
}

// Links of two graphs may form a circle; one that closes it is left out.
function acyclic(links) {
  const next = new Map();
  const reaches = (from, to, seen = new Set()) => {
    if (from === to) return true;
    if (seen.has(from)) return false;
    seen.add(from);
    return (next.get(from) || []).some((other) => reaches(other, to, seen));
  };
  return links.filter((link) => {
    if (reaches(link.target, link.source)) return false;
    if (!next.has(link.source)) next.set(link.source, []);
    next.get(link.source).push(link.target);
    return true;
  });
}
