// A sweep: its runs as a table, a row for those that differ in the seed alone, and their curves.

class SweepPage {
  constructor(contents) {
    this.contents = contents;
    this.charts = new Charts(contents.curves);
    this.element = this.panel();
    document.body.append(
      this.header(), headlineElement(contents.headline.map(([label, text]) => `${label} ${text}`).join(", "), contents.headline),
      el("main", null, this.element),
    );
    onNewWidth(this.element, () => this.charts.draw());
    document.addEventListener("keydown", (event) => {
      const typing = event.target.matches("input") || event.ctrlKey || event.metaKey || event.altKey;
      if (event.key === "d" && !typing) this.theme();
    });
  }

  header() {
    const { contents } = this;
    return el(
      "header", { id: "head" }, el("h1", null, contents.graph, el("small", null, `sweep in ${contents.folder}`)),
      el("span", { class: "tools" }, button("◐", { title: "light or dark (d)", "aria-label": "light or dark" }, () => this.theme())),
    );
  }

  panel() {
    const { contents } = this;
    return el(
      "section", { class: "panel", id: "panel-sweep" },
      el("h2", { id: "results" }, "Results"), this.table(), el("p", { class: "note" }, contents.legend),
      el("h2", { id: "metrics" }, "Metrics"), ...this.charts.head, this.charts.element,
      el("h2", { id: "runs" }, "Runs"), this.runs(),
    );
  }

  table() {
    const { heads, metrics, rows } = this.contents;
    const cells = (row) => row.cells.map((cell, n) => (row.highest.includes(n) ? el("b", { class: "highest" }, cell) : cell));
    return table([...heads, ">runs", ...metrics.map((name) => `>${name}`)], rows.map(cells), { class: "beside" });
  }

  runs() {
    const rows = this.contents.runs.map(([folder, state]) => [folder, state, el("code", null, `rlgraph view ${folder}`)]);
    return table(["folder", "reached", "its page"], rows, { class: "beside runs" });
  }

  theme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    this.charts.draw();
  }
}

window.page = new SweepPage(JSON.parse(document.getElementById("contents").textContent));
