// The graph: steps, what goes between them, and the versions of models beside them.

const CHARACTER = 6.6; // the width of one, in the font of labels
const LINES = 3; // columns that a label names
const NARROW = 600; // pixels of a window below which lanes have no room: boxes name the versions too

// What is drawn: all steps, or those that the user wrote with the columns between them followed through copies.
function drawnGraph(steps, links, inserted) {
  if (inserted) return { steps, links };
  const writer = new Map(steps.flatMap((step) => step.writes.map((column) => [column, step])));
  const shown = steps.filter((step) => !step.inserted);
  const found = new Map();
  for (const step of shown) {
    for (const column of step.reads) {
      for (const [source, name] of written(writer, column)) {
        const key = `${source.id} ${step.id}`;
        if (!found.has(key)) found.set(key, { source: source.id, target: step.id, columns: [] });
        if (!found.get(key).columns.includes(name)) found.get(key).columns.push(name);
      }
    }
  }
  const kept = new Set(shown.map((step) => step.id));
  const waits = links.filter((link) => !link.columns.length && kept.has(link.source) && kept.has(link.target));
  return { steps: shown, links: [...found.values(), ...waits] };
}

// The steps that the user wrote and their columns, of which a column is a copy, or merged.
function written(writer, column) {
  const step = writer.get(column);
  if (!step || !step.inserted) return step ? [[step, column]] : [];
  const { reads, writes } = step;
  return (reads.length === writes.length ? [reads[writes.indexOf(column)]] : reads).flatMap((each) => written(writer, each));
}

// A column and its copies.
function family(steps, column) {
  const found = new Set([column]);
  const pairs = steps.filter((step) => step.inserted).flatMap((step) => step.writes.map((copy, n) => [step.reads[n], copy]));
  for (const [read, copy] of pairs) if (found.has(read)) found.add(copy);
  for (const [read, copy] of [...pairs].reverse()) if (found.has(copy)) found.add(read);
  for (const [read, copy] of pairs) if (found.has(read)) found.add(copy);
  return found;
}

function labelOf(link, columns, types) {
  const said = (name) => (types && columns[name] ? `${name}: ${columns[name].type}` : name);
  const lines = link.columns.slice(0, LINES).map(said);
  if (link.columns.length > LINES) lines.push(`+ ${link.columns.length - LINES} more`);
  return lines;
}

class GraphView {
  // options: steps, links, columns, weights, pools, status (node -> added, removed, changed), select(kind, name), and what
  // folds: fold(step), foldAll({pool} or {region})
  constructor(options) {
    Object.assign(this, { inserted: true, types: false, folds: [], fold: () => {}, foldAll: () => {} }, options);
    this.root = svg("g");
    [this.head, this.arrow] = arrowhead();
    this.svg = svg("svg", { class: "graph", role: "group", "aria-label": "the graph" }, this.head, this.root);
    this.navigation = new Navigation(this.svg, this.root);
    this.draw();
  }

  draw() {
    const { steps, links, at } = foldedGraph(drawnGraph(this.steps, this.links, this.inserted), this.folds, this.pools);
    this.at = at;
    const large = steps.length > LARGE;
    const nodes = steps.map((step) => this.box(step, large));
    const edges = links.map((link) => {
      const lines = large ? [] : labelOf(link, this.columns, this.types);
      const width = Math.max(0, ...lines.map((line) => line.length)) * CHARACTER * 0.88;
      return { from: link.source, to: link.target, link, lines, width: width && width + 8, height: lines.length * 12 };
    });
    const groups = groupsOf(steps, this.pools);
    for (const node of nodes) node.group = (groups.find((group) => group.region === node.step.region) || groups.find((group) => group.id === `pool ${node.step.pool}`) || {}).id;
    const placed = layout(nodes, edges, groups);
    this.nodes = new Map();
    this.edges = [];
    const boxes = placed.boxes.map((box) => this.group(box));
    const drawnEdges = edges.map((edge, n) => this.edge(edge, placed.edges[n]));
    const drawnNodes = nodes.map((node, n) => this.node(node, placed.nodes[n], large));
    const right = Math.max(...placed.nodes.map((node) => node.x + node.width / 2), ...placed.edges.map((edge) => (edge.x || 0) + (edge.width || 0) / 2));
    const { lanes, end } = large || innerWidth < NARROW ? { lanes: [], end: right + 16 } : this.lanes(right + 34);
    this.root.replaceChildren(...boxes, ...lanes, ...drawnEdges, ...drawnNodes);
    this.navigation.size = { width: end, height: Math.max(...placed.nodes.map((node) => node.y + node.height / 2)) + 34 };
  }

  models() {
    return [...new Set(this.weights.map((weights) => weights.model))];
  }

  box(step, large) {
    const below = large ? "" : [step.inserted || step.op === step.title ? "" : step.op, step.often].filter(Boolean).join(", ");
    const models = versions(step);
    const longest = Math.max(step.title.length * 1.05, below.length * 0.9, ...models.map((name) => name.length * 0.85));
    const height = 26 + (below ? 14 : 0) + (models.length && !large ? 2 + 14 * models.length : 0);
    return { id: step.id, step, below, models: large ? [] : models, width: longest * CHARACTER + 26, height };
  }

  node(node, at, large) {
    const { step } = node;
    const left = -node.width / 2;
    const top = -node.height / 2;
    const kind = [`node work-${step.work}`, step.inserted && "inserted", step.inside && "folded", this.status && this.status[step.node]];
    const pick = () => this.select("step", step);
    const drawn = svg(
      "g",
      {
        class: kind.filter(Boolean).join(" "), transform: `translate(${at.x} ${at.y})`, tabindex: 0, role: "button", "data-id": step.id,
        onclick: pick, ondblclick: () => this.fold(step), onkeydown: (event) => event.key === "Enter" && pick(),
        onpointerenter: () => this.light(this.around(step)), onpointerleave: () => this.light(this.picked),
      },
      step.inside && svg("rect", { class: "behind", x: left + 5, y: top + 5, width: node.width, height: node.height, rx: 7 }),
      svg("rect", { x: left, y: top, width: node.width, height: node.height, rx: 7 }),
      svg("rect", { class: "stripe", x: left, y: top, width: 5, height: node.height, rx: 2 }),
      svg("text", { y: top + 17, class: "title" }, step.title),
      node.below && svg("text", { y: top + 31, class: "op" }, node.below),
      ...node.models.map((name, n) => this.pill(name, n, node, top)),
      large ? null : svg("title", null, step.because ? `${step.does}\nbecause ${step.because}` : step.does),
    );
    this.nodes.set(step.id, { drawn, step, at, height: node.height });
    return drawn;
  }

  pill(name, n, node, top) {
    const y = top + (node.below ? 45 : 31);
    return svg("text", { y: y + n * 14, class: "pill" }, name);
  }

  edge(edge, at) {
    const path = svg("path", { d: curve(at.points), class: "line", "marker-end": this.arrow });
    const lines = edge.lines.map((line, n) => {
      const column = edge.link.columns[n];
      const events = column && {
        tabindex: -1, role: "button", "data-column": column, onclick: () => this.select("column", column),
        onpointerenter: () => this.lightColumn(column), onpointerleave: () => this.light(this.picked),
      };
      return svg("text", { x: at.x, y: at.y - edge.height / 2 + 9 + 12 * n, class: column ? "column" : "more", ...events }, line);
    });
    const kind = ["edge", !edge.link.columns.length && "order", edge.link.status];
    const drawn = svg("g", { class: kind.filter(Boolean).join(" ") }, path, ...lines);
    this.edges.push({ drawn, link: edge.link });
    return drawn;
  }

  group({ group, ...box }) {
    const [x, y] = [box.x - box.width / 2, box.y - box.height / 2];
    const fold = () => this.foldAll(group.region ? { region: group.region } : { pool: group.pool });
    const events = { tabindex: 0, role: "button", "data-group": group.id, onclick: fold, onkeydown: (event) => event.key === "Enter" && fold() };
    return svg(
      "g",
      { class: `group${group.region ? " region" : ""}` },
      svg("rect", { x, y, width: box.width, height: box.height, rx: 12 }),
      svg("text", { x: x + 6, y: y - (group.region ? 3 : 6), ...events }, group.text, svg("title", null, "fold it")),
    );
  }

  // A lane for each model: which version is read and written, at the height of the steps that do, and which those are.
  lanes(left) {
    const bottom = Math.max(...[...this.nodes.values()].map((node) => node.at.y + node.height / 2));
    const lanes = [];
    let x = left + 20;
    for (const model of this.models()) {
      const marks = this.marks(this.weights.filter((weights) => weights.model === model), x);
      const pick = () => this.select("model", model);
      lanes.push(svg(
        "g",
        {
          class: "lane", tabindex: 0, role: "button", "data-model": model, onclick: pick,
          onkeydown: (event) => event.key === "Enter" && pick(), onpointerenter: () => this.light(this.users(model)), onpointerleave: () => this.light(this.picked),
        },
        svg("title", null, `model ${model}: rings read it, diamonds write its next version`),
        svg("line", { x1: x, x2: x, y1: 34, y2: bottom }),
        svg("text", { x, y: 20, class: "title" }, model),
        ...marks.map(({ mark }) => mark), ...marks.map(({ y, text, kind }) => svg("text", { x: x + 10, y: y + 4, class: kind }, text)),
      ));
      x += Math.max(30, model.length * CHARACTER * 0.55, ...marks.map(({ text }) => text.length * CHARACTER * 0.92)) + 34;
    }
    return { lanes, end: x };
  }

  // The marks on a lane: a ring where a step reads, a diamond where one writes; steps side by side share one.
  marks(versions, x) {
    const at = (id) => this.nodes.get(this.at(id));
    const found = new Map(); // height -> what is there
    const put = (y, text, kind, mark) => {
      const near = [...found.values()].find((other) => other.kind === kind && Math.abs(other.y - y) < 12);
      if (near && !near.text.split(", ").includes(text)) near.text += `, ${text}`;
      if (!near) found.set(`${kind} ${y}`, { y, text, kind, mark });
    };
    for (const { readers, writer, version } of versions) {
      const reading = [...new Set(readers.map(this.at))].map(at).filter(Boolean).sort((a, b) => a.at.y - b.at.y);
      for (const { at: { y }, step } of reading) put(y, step.title, "reader", svg("circle", { cx: x, cy: y, r: 4 }));
      const made = writer && at(writer);
      if (made) {
        const y = made.at.y + made.height / 2 + 2;
        put(y, `@${version}`, "version", svg("rect", { x: x - 5, y: y - 5, width: 10, height: 10, transform: `rotate(45 ${x} ${y})` }));
      } else if (reading.length) {
        put(Math.max(reading[0].at.y - 14, 38), `@${version}`, "version", null);
      }
    }
    return [...found.values()];
  }

  users(model) {
    return { nodes: new Set(this.steps.filter((step) => model in step.models).map((step) => step.id)), edges: () => false };
  }

  around(step) {
    const id = this.at(step.id);
    const nodes = new Set([id]);
    for (const { link } of this.edges) {
      if (link.source === id) nodes.add(link.target);
      if (link.target === id) nodes.add(link.source);
    }
    if (!this.nodes.has(id)) nodes.clear(); // hidden, or of the other graph
    return { nodes, edges: (link) => link.source === id || link.target === id };
  }

  lightColumn(column) {
    this.light(this.life(column));
  }

  // The steps that write, copy and read a column, and what goes between them.
  life(column) {
    const copies = family(this.steps, column);
    const touches = (step) => [...step.reads, ...step.writes].some((name) => copies.has(name));
    return { nodes: new Set(this.steps.filter(touches).map((step) => step.id)), edges: (link) => link.columns.some((name) => copies.has(name)) };
  }

  // Dim all but some nodes and edges; nothing dims nothing.
  light(found) {
    this.svg.classList.toggle("lit", Boolean(found));
    const on = (step) => found.nodes.has(step.id) || (step.inside || []).some(on);
    for (const node of this.nodes.values()) node.drawn.classList.toggle("on", Boolean(found && on(node.step)));
    for (const edge of this.edges) edge.drawn.classList.toggle("on", Boolean(found && found.edges(edge.link)));
  }

  pick(found, id) {
    this.picked = found;
    for (const [number, node] of this.nodes) node.drawn.classList.toggle("picked", number === this.at(id));
    this.light(found);
  }

  show(id, height) {
    const node = this.nodes.get(this.at(id));
    if (node) this.navigation.center(node.at, height);
  }
}

let arrowheads = 0;

// An arrowhead and how a line names it. Each picture has its own: one of a hidden picture is not drawn.
function arrowhead() {
  arrowheads += 1;
  const id = `arrow-${arrowheads}`;
  const head = svg("path", { d: "M0 0L8 4L0 8z" });
  const marker = svg("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, head);
  return [svg("defs", null, marker), `url(#${id})`];
}
