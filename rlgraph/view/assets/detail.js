// Panning and zooming, and what is said of a step, a column or a model that was picked.

class Navigation {
  constructor(frame, root) {
    Object.assign(this, { frame, root, x: 0, y: 0, k: 1, size: { width: 1, height: 1 } });
    this.pointers = new Map();
    frame.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    frame.addEventListener("pointerdown", (event) => this.pointers.set(event.pointerId, event));
    frame.addEventListener("pointermove", (event) => this.drag(event));
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) frame.addEventListener(end, (event) => this.pointers.delete(event.pointerId));
  }

  apply() {
    this.root.setAttribute("transform", `translate(${this.x} ${this.y}) scale(${this.k})`);
  }

  // The whole graph; or its whole width and the top, where the whole would be drawn smaller than the least scale.
  fit(least = 0) {
    const { width, height } = this.frame.getBoundingClientRect();
    if (!width) return; // of a panel that is hidden
    const high = Math.max(height / this.size.height, this.size.height < 3000 ? least : 0);
    this.k = Math.min(width / this.size.width, high, width > 2400 ? 2.6 : 1.4);
    this.x = (width - this.size.width * this.k) / 2;
    this.y = Math.min(Math.max((height - this.size.height * this.k) / 2, 0), 40);
    this.apply();
  }

  zoom(factor, x, y) {
    const { width, height } = this.frame.getBoundingClientRect();
    const k = Math.min(Math.max(this.k * factor, 0.03), 6);
    const [cx, cy] = [x ?? width / 2, y ?? height / 2];
    this.x = cx - ((cx - this.x) * k) / this.k;
    this.y = cy - ((cy - this.y) * k) / this.k;
    this.k = k;
    this.apply();
  }

  // height: of the place in the frame, from 0 to 1
  center(at, height = 0.5) {
    const frame = this.frame.getBoundingClientRect();
    this.k = Math.max(this.k, 0.8);
    this.x = frame.width / 2 - at.x * this.k;
    this.y = frame.height * height - at.y * this.k;
    this.apply();
  }

  wheel(event) {
    event.preventDefault();
    const box = this.frame.getBoundingClientRect();
    this.zoom(Math.exp(-event.deltaY / 500), event.clientX - box.left, event.clientY - box.top);
  }

  // One pointer drags, two zoom.
  drag(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    this.pointers.set(event.pointerId, event);
    const others = [...this.pointers.values()].filter((other) => other.pointerId !== event.pointerId);
    if (others.length) {
      const far = (one) => Math.hypot(one.clientX - others[0].clientX, one.clientY - others[0].clientY) || 1;
      this.zoom(far(event) / far(before));
    } else {
      this.x += event.clientX - before.clientX;
      this.y += event.clientY - before.clientY;
      this.apply();
    }
  }
}

const docsOf = (contents, name) => contents.docs[name];

function docsBlock(name, docs) {
  if (!docs) return [el("p", { class: "note" }, `${name} is a function in a file; rlgraph nodes ${name} shows its docs.`)];
  return [
    el("h3", null, name),
    el("p", null, docs.summary),
    docs.body && el("pre", { class: "doc" }, docs.body),
    facts(docs.facts),
  ];
}

// A name that leads to what it names.
function go(text, onclick) {
  return button(text, { class: "link" }, onclick);
}

function columnsList(names, columns, pick) {
  return el("ul", { class: "plain" }, ...names.map((name) => el("li", null, go(name, () => pick("column", name)), columns[name] ? ` ${columns[name].type}` : "")));
}

function stepDetail(contents, phase, step, pick) {
  const { columns } = contents.phases[phase] || { columns: {} };
  const devices = step.devices.length === 1 ? `device ${step.devices[0]}` : `devices ${step.devices[0]}-${step.devices[step.devices.length - 1]}`;
  const section = (title, names) => (names.length ? [el("h3", null, title), columnsList(names, columns, pick)] : []);
  const attributes = step.attributes.map(([name, value, place]) => [name, value, el("span", null, ...(place || "default").split(/(?<=\/)/).flatMap((part) => [part, el("wbr")]))]);
  return [
    el("h2", null, step.title),
    el("p", null, step.does),
    step.because && el("p", { class: "because" }, `because ${step.because}`),
    facts([
      ["step", `${step.id}${step.inserted ? ", inserted" : ""}`], ["op", step.op], ["where", `pool ${step.pool}, ${devices}`],
      ["models", versions(step).join(", ")],
      ["rows lie", layoutText(step.layout)], ["runs", step.often], ["region", step.region && regionText(step.region)], ["runs ahead", step.lead ? `${step.lead} iterations` : ""], ["takes", step.takes], ["written in", step.place],
    ]),
    attributes.length ? [el("h3", null, "attributes"), table(["name", "value", "from"], attributes, { class: "small" })] : [],
    ...section("reads", step.reads), ...section("writes", step.writes), ...section("frees", step.frees),
    step.op ? docsBlock(step.op, docsOf(contents, step.op)) : [],
    ...step.losses.map((loss) => docsBlock(loss, docsOf(contents, loss))),
  ].flat();
}

// How rows lie on the devices, as rlgraph/passes/partition.py decides it.
function layoutText(layout) {
  const [way, minibatches] = (layout || "").split("/");
  const said = {
    one: "all on the first device", even: "each device has its share of the prompts, with all samples of each",
    balanced: `so that devices have nearly equal work in each of ${minibatches} minibatches`,
  }[way];
  return said ? `${layout}: ${said}` : layout;
}

function foldDetail(contents, phase, box, pick) {
  const named = (step) => el("li", null, go(step.title, () => pick("step", step)), step.inserted ? " +" : ` ${step.op}`);
  return [
    el("h2", null, box.title), el("p", null, `${box.op}. Press f, or click twice, to unfold it.`),
    el("h3", null, "steps"), el("ul", { class: "plain" }, ...box.inside.map(named)),
  ];
}

function columnDetail(contents, phase, name, pick) {
  const { steps, columns } = contents.phases[phase];
  const column = columns[name] || {};
  const copies = family(steps, name);
  const named = (step) => el("li", null, go(step.title, () => pick("step", step)), ` step ${step.id}`);
  const list = (title, found) => (found.length ? [el("h3", null, title), el("ul", { class: "plain" }, ...found.map(named))] : []);
  const touching = (field) => steps.filter((step) => step[field].some((each) => copies.has(each)));
  const rows = column.parent ? `${column.domain}: ${column.times} for each of ${column.parent}` : column.domain;
  return [
    el("h2", null, name),
    facts([["type", column.type], ["rows", rows], ["weighs", column.weight], ["rows lie", layoutText(column.layout)], ["copies", [...copies].filter((copy) => copy !== name).join(", ")]]),
    ...list("written by", touching("writes").filter((step) => !step.inserted)),
    ...list("copied by", touching("writes").filter((step) => step.inserted)),
    ...list("read by", touching("reads").filter((step) => !step.inserted)),
    ...list("freed after", touching("frees")),
  ];
}

function modelDetail(contents, phase, name, pick) {
  const model = contents.models[name];
  const { steps } = contents.phases[phase];
  const pairs = (held) => Object.entries(held || {}).map(([key, value]) => [key, value === null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value)]);
  const part = (title, held) => (held ? [el("h3", null, title), facts(pairs(held))] : []);
  const named = (step) => el("li", null, go(step.title, () => pick("step", step)), ` ${step.models[name] && `${name}@${step.models[name]}`}${step.updates ? ", writes the next version" : ""}`);
  return [
    el("h2", null, `model ${name}`),
    facts([["path", model.path], ["head", model.head], ["state", model.frozen ? "frozen" : model.optimizer ? "trained" : "tokenizer only"],
      ...(model.shares ? [["on the weights of", model.shares]] : [])]),
    el("h3", null, "steps"), el("ul", { class: "plain" }, ...steps.filter((step) => name in step.models).map(named)),
    ...part("train engine", model.train), ...part("serve engine", model.serve), ...part("optimizer", model.optimizer),
  ];
}
