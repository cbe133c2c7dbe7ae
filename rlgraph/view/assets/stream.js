// The groups of a stream over time, predicted or recorded: what becomes of each, with the weights of which version.

const VERSIONS = 5; // colours, which come again

class StreamChart {
  constructor(id, title, says) {
    this.legend = el("p", { class: "legend" });
    this.chart = el("div", { class: "chart", "data-chart": "stream" });
    const how = "Each lane holds a group of samples from when it is begun until an update uses it.";
    this.parts = [el("h2", { id }, title), el("p", { class: "note" }, `${says} ${how}`), this.legend, this.chart];
  }

  draw({ every, groups, updates, syncs }, from, to) {
    const shown = groups.filter(([, , , begun, drawn, used]) => begun < to && (used || drawn) > from);
    const lanes = [...new Set(shown.map(([lane]) => lane))].sort((a, b) => a - b);
    const said = every > 1 ? `1 of ${every} lanes` : "groups";
    const chart = new TimeChart(Math.max(this.chart.clientWidth, 280), from, to, [said, "update"]);
    const top = chart.y;
    chart.y += 16; // the marks' names
    chart.label(said, 26);
    for (const lane of lanes) {
      chart.lane("", shown.filter((group) => group[0] === lane).flatMap(groupBars), lanes.length > 32 ? 6 : lanes.length > 16 ? 10 : 16);
    }
    chart.lane("update", updates.map(([start, end, n]) => ({ start, end, text: String(n + 1), kind: "update", about: `update ${n + 1}: ${secondsText(end - start)}` })));
    chart.marks(top + 16, updates.map(([start, , n]) => [start, "", `update ${n + 1} takes its rows`]), "used");
    chart.marks(top, syncs.map(([at, n]) => [at, `weights ${n}`, `weights ${n} come`]), "sync");
    const versions = [...new Set(shown.map(([, , weights]) => weights))].sort((a, b) => a - b);
    const colours = versions.map((weights) => [versionKind(weights), `begun with weights ${weights}`]);
    this.legend.replaceChildren(...legend([], [...colours, ["waits", "drawn, and waits"], ["used", "an update takes its rows"], ["sync", "new weights"]]).childNodes);
    this.chart.replaceChildren(chart.draw("groups of the stream over time"));
  }
}

const versionKind = (weights) => `work-version-${weights % VERSIONS}`;

// A bar while a group is drawn, and a pale one while it waits.
function groupBars([, prompt, weights, begun, drawn, used]) {
  const said = `prompt ${prompt}, begun with weights ${weights}: drawn in ${secondsText(drawn - begun)}`;
  const about = used ? `${said}, used ${secondsText(used - drawn)} later` : `${said}, not used`;
  const bar = { start: begun, end: drawn, text: String(weights), kind: `version-${weights % VERSIONS}`, about };
  return used ? [bar, { ...bar, start: drawn, end: used, text: "", faint: true }] : [bar];
}
