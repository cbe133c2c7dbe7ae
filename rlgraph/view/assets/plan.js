// The plan: when each step is expected to run, what devices hold, where engines are, and why each step is there.

class PlanPanel {
  constructor(contents, pick) {
    Object.assign(this, { contents, pick, view: "steady", picked: null, every: false });
    this.steps = new Map(contents.phases.train.steps.map((step) => [step.id, step]));
    this.chart = el("div", { class: "chart", "data-chart": "plan" });
    this.stream = contents.stream && new StreamChart("predicted-groups", "Groups of the stream, as predicted", "At the best rates.");
    this.element = el("section", { class: "panel", id: "panel-plan" }, ...this.head(), this.chart, ...(this.stream ? this.stream.parts : []), ...this.tables());
    new ResizeObserver(() => this.draw()).observe(this.chart);
  }

  head() {
    const { timeline } = this.contents;
    const views = [["iteration", "one iteration"], ["steady", "steady state"], ["all", "from start to end"]];
    const guess = timeline.guessed ? "Lengths are rough guesses without a unit: name a cluster (--cluster h100-8) for seconds and memory." : "A bar is as long as the middle of what its step takes at best and at worst, the geometric mean; point at it for both.";
    this.all = toggle("arrows", false, "what goes from step to step: columns and weights (a)", (on) => { this.every = on; this.draw(); });
    const works = [...new Set([...this.steps.values()].map((step) => step.work))];
    return [
      el("div", { class: "bar-of-tools" }, choice("what to show", views, this.view, (view) => { this.view = view; this.draw(); }), this.all, legend(works, [["there", "engine on the device"], ["away", "off it"]])),
      el("p", { class: "note" }, guess, this.contents.memory && " In the memory, greens and blues stay (weights, optimizers, reserves), and other colours come and go with steps.", " Pick a step to see what it waits for and what it hands on."),
    ];
  }

  window() {
    const { events, period, count, depth } = this.contents.timeline;
    const middle = depth + 1;
    const of = (iteration) => events.filter((event) => event[1] === iteration);
    const span = (found) => [Math.min(...found.map((event) => event[2])), Math.max(...found.map((event) => event[3]))];
    if (this.view === "all") return span(events);
    if (this.view === "iteration") return span(of(Math.min(middle, count - 1)));
    const start = Math.min(...of(middle).map((event) => event[2]));
    return [start, start + 2 * period];
  }

  draw() {
    const { timeline } = this.contents;
    const [from, to] = this.window();
    const chart = new TimeChart(Math.max(this.chart.clientWidth, 280), from, to, this.labels(), timeline.guessed);
    const rows = this.lanes(chart, from, to);
    this.memory(chart, from, to);
    this.engines(chart, from, to);
    this.arrows(chart, rows, from, to);
    this.chart.replaceChildren(chart.draw("steps over time"));
    if (this.stream) this.stream.draw(this.contents.stream, ...this.contents.stream.window);
  }

  // What stands before the lanes.
  labels() {
    const { timeline, engines, pools } = this.contents;
    const parts = Object.entries(engines).flatMap(([name, engine]) => engine.parts.map((part) => `${name} ${part}`));
    return [...timeline.lanes.map(laneText), ...parts, ...Object.keys(pools).map((pool) => `pool ${pool}`)];
  }

  lanes(chart, from, to) {
    const rows = new Map(); // step -> where its first lane is
    let pool = null;
    for (const lane of this.contents.timeline.lanes) {
      if (lane.pool !== pool) chart.heading(`pool ${lane.pool}`);
      pool = lane.pool;
      for (const id of lane.steps) if (!rows.has(id)) rows.set(id, chart.y + ROW / 2);
      const mine = new Set(lane.steps);
      chart.lane(laneText(lane), this.bars(mine, from, to));
    }
    return rows;
  }

  bars(mine, from, to) {
    const { events, guessed, depth } = this.contents.timeline;
    return events
      .filter(([id, , start, end]) => mine.has(id) && end > from && start < to)
      .map(([id, iteration, start, end]) => {
        const step = this.steps.get(id);
        const took = guessed ? "" : `, drawn as ${secondsText(end - start)}: ${step.takes}`;
        const other = this.view === "iteration" && iteration !== Math.min(depth + 1, this.contents.timeline.count - 1);
        return {
          start, end, text: step.title, kind: step.work, faint: other || (this.picked && this.picked !== id), data: { "data-step": id },
          about: `${step.title}, iteration ${iteration}${took}${step.because ? `\nbecause ${step.because}` : ""}`,
          onclick: () => this.choose(step),
        };
      });
  }

  choose(step) {
    this.picked = this.picked === step.id ? null : step.id;
    this.draw();
    this.pick("step", step);
  }

  arrows(chart, rows, from, to) {
    const { events, arrows } = this.contents.timeline;
    const at = new Map(events.map(([id, iteration, start, end]) => [`${id} ${iteration}`, [start, end]]));
    const found = arrows.filter(([source, , target]) => this.every || this.picked === source || this.picked === target);
    chart.arrows(
      found.flatMap(([source, before, target, after, text]) => {
        const [a, b] = [at.get(`${source} ${before}`), at.get(`${target} ${after}`)];
        if (!a || !b || a[1] < from || b[0] > to) return [];
        return [{ x1: chart.x(Math.max(a[1], from)), y1: rows.get(source), x2: chart.x(b[0]), y2: rows.get(target), text, faint: this.picked !== source && this.picked !== target }];
      }),
    );
  }

  memory(chart, from, to) {
    const { memory, timeline } = this.contents;
    if (!memory) return;
    const { parts } = memory;
    chart.heading(`memory of a device, on ${memory.cluster}`);
    for (const [pool, held] of Object.entries(memory.pools)) {
      const mine = timeline.events.filter(([id, , start, end]) => held[id] && end > from && start < to).sort((a, b) => a[2] - b[2]);
      const moments = mine.map(([id, , start, end]) => ({ start, end, parts: held[id], about: `in ${this.steps.get(id).title}` }));
      chart.stack(`pool ${pool}`, this.rested(moments, held[0], from, to), parts, memory.capacity);
    }
    chart.add(svg("g", null, ...this.partsLegend(chart, parts)));
  }

  partsLegend(chart, parts) {
    let x = chart.left;
    const found = [];
    for (const part of parts) {
      const width = textWidth(part) + 32;
      if (x + width > chart.width) [x, chart.y] = [chart.left, chart.y + 17];
      found.push(svg("rect", { class: partClass(part), x, y: chart.y + 2, width: 11, height: 11, rx: 2 }), svg("text", { class: "small", x: x + 16, y: chart.y + 12 }, part));
      x += width;
    }
    chart.y += 22;
    return found;
  }

  // With what is held while nothing runs, between steps.
  rested(moments, rest, from, to) {
    const found = [];
    let at = from;
    for (const moment of moments) {
      if (moment.start > at) found.push({ start: at, end: moment.start, parts: rest, about: "between steps" });
      found.push(moment);
      at = Math.max(at, moment.end);
    }
    if (at < to) found.push({ start: at, end: to, parts: rest, about: "between steps" });
    return found;
  }

  engines(chart, from, to) {
    const { engines, timeline } = this.contents;
    chart.heading("engines");
    for (const [name, engine] of Object.entries(engines)) {
      const [held] = name.split(" on ");
      const [model, kind] = [held.slice(0, held.lastIndexOf(".")), held.slice(held.lastIndexOf(".") + 1)];
      const here = (step) => step.pool === engine.pool || (kind === "train" && step.source === engine.pool);
      const works = (step) => model in step.models && step.engines.includes(kind) && here(step);
      const mine = timeline.events.filter(([id]) => works(this.steps.get(id))).sort((a, b) => a[2] - b[2]);
      for (const part of engine.parts) {
        chart.lane(`${name} ${part}`, this.bands(mine, part, kind, engine.away.includes(part), from, to));
      }
    }
  }

  bands(events, part, kind, away, from, to) {
    const found = [];
    let since = Math.min(from, ...events.map((event) => event[2]));
    const state = (end) => end > since && found.push({ start: since, end, text: away ? "away" : "", kind: away ? "away" : "there", about: `${part} ${away ? "off" : "on"} the device` });
    for (const [id, iteration, start, end] of events) {
      const step = this.steps.get(id);
      const moves = step.parts.includes(part) && step.moves;
      if (moves) {
        const moved = moves === "back" ? start : end;
        state(moved);
        [since, away] = [moved, moves === "off"];
      }
      if (!moves && (part !== "optimizer" || step.updates)) {
        const version = Object.values(step.models)[0] || "";
        found.push({ start, end, text: `${step.title} ${version}`, kind: step.work, about: `${step.title} of iteration ${iteration} uses it, at version ${version}`, late: true });
      }
    }
    state(to);
    return found.sort((a, b) => Boolean(a.late) - Boolean(b.late));
  }

  tables() {
    const { contents } = this;
    const parts = [["train", `every iteration, ${contents.iterations} times`], ["eval", "every evaluation"]].filter(([phase]) => contents.phases[phase]);
    const lines = (title, found) => (found.length ? [el("h3", null, title), el("ul", null, ...found.map((line) => el("li", null, line)))] : []);
    return [
      ...parts.flatMap(([phase, title]) => [el("h2", null, `Steps of ${title}`), this.table(contents.phases[phase].steps)]),
      contents.predicted.length ? el("pre", null, contents.predicted.join("\n")) : null,
      ...lines("notes", contents.notes), ...lines("still open", contents.open),
    ];
  }

  // The row of a step; nothing where another panel is shown, or of a box of several steps.
  show(step) {
    const row = this.element.querySelector(`[data-row="${step.id}"][data-phase="${step.phase}"]`);
    if (row) row.scrollIntoView({ block: "center" });
    for (const other of this.element.querySelectorAll("tr.picked")) other.classList.remove("picked");
    if (row) row.classList.add("picked");
  }

  table(steps) {
    const rows = steps.map((step) => ({
      attributes: { class: step.inserted ? "inserted" : null, "data-row": step.id, "data-phase": step.phase },
      cells: [String(step.id), [go(step.title, () => this.pick("step", step)), step.inserted ? " +" : ""], step.does, step.because, step.takes],
    }));
    return table([">#", "step", "does", "because", "takes"], rows, { class: "steps" });
  }
}

const laneText = ({ first, last, beside }) => `${beside ? "beside" : first === last ? "device" : "devices"} ${first === last ? first : `${first}-${last}`}`;
