// Charts of metrics over iterations: of one run, or of several runs as lines, where runs that differ in the seed alone
// are one line, the mean, within a band from the lowest of them to the highest.

const FIRST = ["reward/mean", "rollout/length", "time/step", "/loss", "/entropy", "/kl_ref", "/grad_norm", "/clip_fraction"];
const FEW = 6; // charts that are shown before all are asked for
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power)); // steps between marks
const HUES = 5; // colours of lines; lines of one colour differ in their dashes
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const NUMBERS = (value) => typeof value === "number";

class Charts {
  // groups: [{name, runs: [{name, metrics}]}], a line for each; metrics: name -> a value per line, steps among them.
  // kept: what was chosen before the page had newer contents.
  constructor(groups, kept = {}) {
    Object.assign(this, { groups: groups.filter((group) => group.runs.length), plots: [], filter: "", all: false, hidden: [], ...kept });
    this.single = this.groups.length === 1 && this.groups[0].runs.length === 1;
    this.element = el("div", { class: "charts", "data-chart": "metrics" });
    this.head = this.makeHead();
  }

  kept() {
    return { filter: this.filter, all: this.all, hidden: this.hidden };
  }

  // Draw the same lines as far as they have come now.
  renew(groups) {
    this.groups = groups.filter((group) => group.runs.length);
    if (this.element.clientWidth) this.draw();
  }

  // The metrics that a chart may show, as the runs have them.
  known() {
    const found = new Map();
    for (const group of this.groups) {
      for (const { metrics } of group.runs) {
        for (const name of Object.keys(metrics)) if (name !== "step" && metrics[name].some(NUMBERS)) found.set(name, true);
      }
    }
    return [...found.keys()];
  }

  makeHead() {
    if (!this.known().length) return [el("p", { class: "note" }, "No metrics yet.")];
    const input = el("input", { type: "search", placeholder: "metrics with these letters", "aria-label": "filter the metrics", value: this.filter, oninput: () => { this.filter = input.value; this.draw(); } });
    const all = toggle("all metrics", this.all, "show every metric", (on) => { this.all = on; this.draw(); });
    return [el("p", { class: "bar-of-tools" }, input, all), this.single ? null : this.lines(), el("p", { class: "note" }, this.about())];
  }

  about() {
    const band = this.groups.some((group) => group.runs.length > 1) ? " A line of several runs is their mean, its band reaches from the lowest of them to the highest; behind the end of one it is of the others." : "";
    return `Left to right: iterations that are done. Drag to zoom in, double-click to zoom out.${band}`;
  }

  // The legend. Pressing a name hides its line or shows it again.
  lines() {
    return el("ul", { class: "lines", "aria-label": "lines" }, ...this.groups.map((group, n) => {
      const shown = !this.hidden.includes(group.name);
      const mark = svg("svg", { class: `line-${n % HUES}`, width: 28, height: 10, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 28, y1: 5, y2: 5, "stroke-dasharray": dashes(n).join(" ") || null }));
      const count = group.runs.length > 1 ? ` (${group.runs.length} runs)` : "";
      const made = toggle("", shown, "show or hide this line", (on) => { this.hidden = this.hidden.filter((name) => name !== group.name).concat(on ? [] : [group.name]); this.draw(); });
      made.append(mark, el("span", null, `${group.name}${count}`));
      return el("li", null, made);
    }));
  }

  // The metrics of each chart: scores of evaluations and the reward first, which a single run has in one chart.
  names() {
    const known = this.known();
    const evaluated = known.filter((name) => name.startsWith("eval/"));
    const rest = known.filter((name) => !name.startsWith("eval/"));
    const reward = rest.filter((name) => name === "reward/mean");
    const first = FIRST.flatMap((end) => rest.filter((name) => name.endsWith(end)));
    const others = [...first, ...rest.filter((name) => !name.startsWith("time/")), ...rest, ...evaluated];
    const scores = [...reward, ...evaluated.filter(isScore)];
    const heads = this.single ? [scores].filter((names) => names.length) : scores.map((name) => [name]);
    const all = [...heads, ...[...new Set(others)].filter((name) => !scores.includes(name)).map((name) => [name])];
    if (!this.filter) return this.all ? all : all.slice(0, FEW);
    return all.filter((names) => names.some((name) => name.toLowerCase().includes(this.filter.toLowerCase())));
  }

  draw() {
    for (const plot of this.plots) plot.destroy();
    const probe = el("i", { hidden: true }); // a canvas wants a colour as it is in this theme
    this.element.after(probe);
    const colour = (name, part = 100) => {
      probe.style.color = part < 100 ? `color-mix(in srgb, var(${name}) ${part}%, transparent)` : `var(${name})`;
      return getComputedStyle(probe).color;
    };
    const columns = Math.max(1, Math.min(4, Math.floor(this.element.clientWidth / 420)));
    const width = Math.max((this.element.clientWidth - 16 * (columns - 1)) / columns - 1, 240);
    this.plots = [];
    this.element.replaceChildren(...this.names().map((names) => this.figure(names, width, colour)));
    probe.remove();
  }

  figure(names, width, colour) {
    const caption = this.single ? names.map((name, n) => el("span", { class: `line-${n % HUES}` }, name)) : names.map((name) => el("span", null, name));
    const box = el("figure", { style: `width: ${width}px` }, el("figcaption", null, ...caption));
    const drawn = this.single ? ofOneRun(this.groups[0].runs[0].metrics, names) : this.ofGroups(names[0]);
    this.plots.push(plot(box, names.join(", "), drawn, width, colour));
    return box;
  }

  // The lines of one metric: those of the groups that have it and are not hidden.
  ofGroups(metric) {
    const mine = this.groups.map((group, n) => ({ name: group.name, n, curves: group.runs.map((run) => curveOf(run.metrics, metric)).filter((curve) => curve.length) }));
    const shown = mine.filter((group) => group.curves.length && !this.hidden.includes(group.name));
    const steps = [...new Set(shown.flatMap((group) => group.curves.flat().map(([step]) => step)))].sort((a, b) => a - b);
    const lines = shown.map(({ name, n, curves }) => {
      const many = curves.length > 1;
      const at = new Map(curves[0]);
      const values = many ? steps.map((step) => curves.map((curve) => valueAt(curve, step)).filter(NUMBERS)) : null;
      const of = (made) => values.map((found) => (found.length ? made(found) : null));
      return {
        name, n, points: metric.startsWith("eval/"),
        values: many ? of((found) => found.reduce((sum, value) => sum + value, 0) / found.length) : steps.map((step) => at.get(step) ?? null),
        band: many ? [of((found) => Math.max(...found)), of((found) => Math.min(...found))] : null,
      };
    });
    return { steps, lines };
  }
}

// As is_score of rlgraph/reports/outcome.py; rlgraph/view/page.py writes OF_ROWS.
const isScore = (name) => name.split("/").length === 2 && !OF_ROWS.includes(name.split("/")[1]);
const dashes = (n) => DASHES[Math.floor(n / HUES) % DASHES.length];

function ofOneRun(metrics, names) {
  return { steps: metrics.step, lines: names.map((name, n) => ({ name: "", n, points: name.startsWith("eval/"), values: metrics[name].map((value) => (NUMBERS(value) ? value : null)), band: null })) };
}

// Pairs of a step and a value, where a run has one.
function curveOf(metrics, metric) {
  return (metrics[metric] || []).flatMap((value, n) => (NUMBERS(value) ? [[metrics.step[n], value]] : []));
}

// The value of a curve at a step, on the straight line between its neighbours; none outside of the curve.
function valueAt(curve, step) {
  const after = curve.findIndex(([each]) => each >= step);
  if (after < 0 || (after === 0 && curve[0][0] > step)) return null;
  const [to, high] = curve[after];
  if (to === step) return high;
  const [from, low] = curve[after - 1];
  return low + ((high - low) * (step - from)) / (to - from);
}

// As the charts' own, but for one value alone.
function yRange(_, from, to) {
  return from === null || from === to ? [(from || 0) - 1, (to || 0) + 1] : uPlot.rangeNum(from, to, 0.1, true);
}

function plot(box, title, { steps, lines }, width, colour) {
  const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") }, font: "11px sans-serif" };
  const [series, data, bands] = [[{}], [steps], []];
  for (const { n, points, values, band } of lines) {
    const stroke = colour(`--line-${n % HUES}`);
    const few = values.filter(NUMBERS).length < 3;
    if (band) bands.push({ series: [series.length, series.length + 1], fill: colour(`--line-${n % HUES}`, 22) });
    for (const edge of band || []) {
      series.push({ stroke: colour(`--line-${n % HUES}`, 35), width: 0.5, spanGaps: true, points: { show: false } });
      data.push(edge);
    }
    series.push({ stroke, width: 1.6, dash: dashes(n), spanGaps: true, points: { show: points || few, size: 6, fill: stroke } });
    data.push(values);
  }
  const options = { width, height: 170, legend: { show: false }, cursor: { y: false, drag: { x: true, y: false } }, scales: { x: { time: false, range: (_, from, to) => (from === to ? [from - 1, to + 1] : [from, to]) }, y: { range: yRange } }, axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 64, values: (_, marks) => marks.map((mark) => String(Number(mark.toPrecision(6)))) }], series, bands };
  const drawn = new uPlot(options, data, box);
  drawn.root.setAttribute("role", "img");
  drawn.root.setAttribute("aria-label", title);
  const said = el("output");
  box.querySelector("figcaption").append(said);
  drawn.over.addEventListener("mousemove", () => {
    const at = drawn.cursor.idx;
    const found = lines.filter((line) => at !== null && NUMBERS(line.values[at]));
    const text = found.map(({ name, values }) => `${name ? `${name} ` : ""}${Number(values[at].toPrecision(6))}`).join(", ");
    said.textContent = at === null ? "" : `step ${steps[at]}: ${text}`;
  });
  return drawn;
}
