// A run: its metrics, its steps as they were measured beside the prediction, what the model wrote, what ran.

class RunPanel {
  // kept: what was chosen before the page had newer contents
  constructor(contents, pick, kept = {}) {
    Object.assign(this, { contents, pick, run: contents.run, iteration: null, ...kept.panel });
    this.steps = new Map(Object.entries(contents.phases).flatMap(([phase, found]) => found.steps.map((step) => [`${phase} ${step.id}`, step])));
    this.charts = new Charts([{ name: this.run.name, runs: [{ name: this.run.name, metrics: this.run.metrics }] }], kept.charts);
    this.lanes = el("div", { class: "chart", "data-chart": "measured" });
    this.stream = this.run.stream && new StreamChart("groups", "Groups of the stream, as recorded", "Those of the iteration chosen above and the one before, and what was under way beside them.");
    const columns = Object.values(contents.phases).flatMap((phase) => Object.values(phase.columns));
    this.samples = new Samples(this.run.samples, columns, kept.samples);
    this.element = el(
      "section", { class: "panel", id: "panel-run" }, el("h2", null, this.run.name), facts(this.run.facts),
      this.run.environment && el("details", { id: "environment" }, el("summary", null, "what it ran on"), ...environment(this.run.environment)),
      this.alarms(), this.restarts(), el("h2", { id: "metrics" }, "Metrics"), ...this.charts.head, this.charts.element, el("h2", { id: "steps" }, contents.timeline.guessed ? "Steps, as measured" : "Steps, measured and predicted"), ...this.iterationHead(), this.lanes, this.beside(),
      ...(this.stream ? this.stream.parts : []), ...this.stages(),
      el("h2", { id: "samples" }, "What the model wrote"), this.samples.element,
    );
    onNewWidth(this.element, () => this.draw());
  }

  kept() {
    return { panel: { iteration: this.iteration }, charts: this.charts.kept(), samples: this.samples.kept() };
  }

  draw() {
    this.charts.draw();
    this.drawLanes();
  }

  // What the watchdog has said.
  alarms() {
    const rows = this.run.alarms.map((line) => [String(line.step), line.rule, `${line.law}: ${line.why}`, el("code", null, line.edits.join(" "))]);
    return rows.length ? el("details", { id: "alarms", open: true }, el("summary", null, `what the watchdog says (${rows.length})`), table([">after iteration", "rule", "what", "try"], rows)) : null;
  }

  restarts() {
    const rows = this.run.restarts.map((line) => [String(line.restart), String(line.after), new Date(1000 * line.time).toLocaleString(), el("pre", null, line.reason)]);
    return rows.length ? el("details", { id: "restarts", open: true }, el("summary", null, `restarts (${rows.length})`), table([">#", ">after iteration", "at", "because"], rows)) : null;
  }

  iterationHead() {
    if (!this.run.iterations.length) return [el("p", { class: "note" }, "No timeline yet.")];
    const select = el("select", { "aria-label": "iteration", onchange: () => { this.iteration = Number(select.value); this.drawLanes(); } },
      ...this.run.iterations.map((iteration) => el("option", { value: iteration }, `iteration ${iteration}`)));
    select.value = this.shownIteration();
    const guessed = this.contents.timeline.guessed && el("span", { class: "note" }, "planned for no cluster, so that nothing is predicted (--cluster auto)");
    return [el("p", { class: "bar-of-tools" }, select, guessed)];
  }

  // The one that was chosen; else the last.
  shownIteration() {
    const { iterations } = this.run;
    return iterations.includes(this.iteration) ? this.iteration : iterations[iterations.length - 1];
  }

  // Measured and predicted on one axis, or each on its own where one would be too small to see.
  drawLanes() {
    const mine = this.run.bars.filter((bar) => bar.iteration === this.shownIteration());
    if (!mine.length) return;
    const from = Math.min(...mine.map((bar) => bar.start));
    const predicted = this.predicted();
    const ends = [Math.max(...mine.map((bar) => bar.end - from)), Math.max(0, ...predicted.map((bar) => bar.end))];
    const apart = predicted.length > 0 && Math.max(...ends) > 4 * Math.min(...ends);
    const width = Math.max(this.lanes.clientWidth, 280);
    const labels = [...mine.map(barPlace), ...this.contents.timeline.lanes.map(lanePlace)];
    const chart = new TimeChart(width, 0, apart ? ends[0] : Math.max(...ends), labels);
    const below = apart ? new TimeChart(width, 0, ends[1], labels) : chart;
    this.measuredLanes(chart, mine, from);
    this.predictedLanes(below, predicted, apart);
    const charts = apart ? [chart.draw("measured steps"), below.draw("predicted steps")] : [chart.draw("steps of an iteration")];
    this.lanes.replaceChildren(...charts);
    this.drawStream();
  }

  // From when the first group of the iteration and the one before was begun until its update was done.
  drawStream() {
    const { stream } = this.run;
    const updates = stream ? stream.updates.filter(([, , n]) => n === this.shownIteration() - 1 || n === this.shownIteration() - 2) : [];
    if (!updates.length) return;
    const [first, last] = [updates[0][0], updates[updates.length - 1]];
    const begun = stream.groups.filter(([, , , , , used]) => used > first - 1e-5 && used < last[0] + 1e-5).map((group) => group[3]);
    this.stream.draw(stream, Math.min(first, ...begun), last[1]);
  }

  // What each stage of a stream did in an iteration, and which of them decides.
  stages() {
    const { stages, bottleneck } = this.run;
    if (!stages.length) return [];
    const spent = (stage) => [stage.busy, stage.starved, stage.held].map((seconds) => `${secondsText(seconds)}, ${three((100 * seconds) / stage.whole)}\u00a0%`);
    const rows = stages.map((stage) => [stage.about, ...spent(stage)]);
    return [el("h2", { id: "stages" }, "Where the stream is held up"), table(["stage", ">busy", ">starved", ">held back"], rows, { class: "beside stages" }), el("p", { class: "note" }, bottleneck)];
  }

  measuredLanes(chart, mine, from) {
    chart.heading("measured");
    for (const place of [...new Set(mine.map(barPlace))].sort()) {
      chart.lane(place, mine.filter((bar) => barPlace(bar) === place).map((bar) => this.bar(bar, from)));
    }
  }

  predictedLanes(chart, predicted, apart) {
    if (!predicted.length) return;
    chart.heading(apart ? "predicted, on another scale" : "predicted");
    for (const lane of this.contents.timeline.lanes) {
      const steps = new Set(lane.steps);
      chart.lane(lanePlace(lane), predicted.filter((bar) => steps.has(bar.id)));
    }
  }

  bar(bar, from) {
    const step = this.steps.get(`${bar.phase} ${bar.step}`);
    const about = `${step.title}, ${bar.phase === "eval" ? "evaluation" : "training"}: ${secondsText(bar.end - bar.start)}`;
    return { start: bar.start - from, end: bar.end - from, text: step.title, kind: step.work, about, faint: bar.phase === "eval", onclick: () => this.pick("step", step) };
  }

  predicted() {
    const { timeline } = this.contents;
    if (timeline.guessed) return [];
    const mine = timeline.events.filter((event) => event[1] === Math.min(timeline.depth + 1, timeline.count - 1));
    const from = Math.min(...mine.map((event) => event[2]));
    return mine.map(([id, , start, end]) => {
      const step = this.steps.get(`train ${id}`);
      return { id, start: start - from, end: end - from, text: step.title, kind: step.work, about: `${step.title}: ${secondsText(end - start)} predicted` };
    });
  }

  beside() {
    const whole = this.run.beside.reduce((sum, row) => sum + row.measured, 0);
    const off = (row) => (row.ratio ? Math.abs(row.measured - row.measured / row.ratio) : 0); // seconds
    const rows = [...this.run.beside].sort((a, b) => off(b) - off(a) || b.measured - a.measured).map((row) => {
      const step = this.steps.get(`train ${row.step}`);
      const predicted = row.predicted ? row.predicted.map(secondsText).join(" to ") : "";
      const beside = this.contents.timeline.guessed ? [] : [predicted, row.ratio ? String(Number(row.ratio.toPrecision(2))) : ""];
      return [go(step.title, () => this.pick("step", step)), secondsText(row.measured), `${three((100 * row.measured) / whole)} %`, ...beside];
    });
    const heads = ["step", ">measured", ">share of the steps", ...(this.contents.timeline.guessed ? [] : [">predicted", ">ratio"])];
    return rows.length ? table(heads, rows, { class: "beside" }) : null;
  }
}

const barPlace = ({ pool, device }) => `${pool} ${device}`.replace(/ (\d+)( beside)?$/, "[$1]$2"); // 0, or "0 beside"
const lanePlace = ({ pool, first, last, beside }) => `${pool}[${first}${last > first ? `-${last}` : ""}]${beside ? " beside" : ""}`;
