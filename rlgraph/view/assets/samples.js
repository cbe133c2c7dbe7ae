// What the model wrote: the rows of a samples file, token by token where it has them, coloured by a column.

const WHOLE_TEXTS = ["tokens", "responses"]; // what the pieces of a row show already
const SHORT = 60; // characters of a text that stands beside its name
const LONG = 240; // characters of a row that has the width of the page
const SPEAKERS = { prompt: "prompt", policy: "policy", tool: "tool output", all: "" };

class Samples {
  // columns: those of the plan; the number of a group or a count has no colour. kept: the file, the colour and the letters that were chosen before
  constructor(samples, columns, kept = {}) {
    const measured = columns.filter((column) => column.type.startsWith("float32")).map((column) => column.origin.split("/")[0]);
    Object.assign(this, { samples, measured: new Set(measured), file: null, colour: null, letters: "", ...kept });
    this.names = Object.keys(samples.files);
    this.rows = el("div", { class: "samples" });
    this.colours = el("span");
    this.said = el("span", { class: "note" });
    this.element = el("div", null, this.head(), this.rows);
    this.draw();
  }

  head() {
    if (!this.names.length) return el("p", { class: "note" }, "No samples yet.");
    const select = el("select", { "aria-label": "samples", onchange: () => { this.file = select.value; this.draw(); } }, ...this.names.map((name) => el("option", { value: name }, name)));
    select.value = this.shown();
    const input = el("input", { type: "search", placeholder: "rows with these letters", "aria-label": "filter the rows", value: this.letters, oninput: () => { this.letters = input.value; this.draw(); } });
    return el("p", { class: "bar-of-tools" }, select, input, this.colours, this.said);
  }

  // The file that was asked for; else the newest of training.
  shown() {
    return this.file in this.samples.files ? this.file : this.newest();
  }

  newest() {
    return this.names.filter((name) => !name.endsWith("-eval")).pop() || this.names[this.names.length - 1];
  }

  kept() {
    return { file: this.file === this.newest() ? null : this.file, colour: this.colour, letters: this.letters };
  }

  draw() {
    if (!this.names.length) return;
    const { rows, of } = this.samples.files[this.shown()];
    const wanted = this.letters.toLowerCase();
    const found = rows.filter((row) => !wanted || JSON.stringify({ ...row, pieces: null }).toLowerCase().includes(wanted));
    const columns = [...new Set(rows.flatMap((row) => tokenColumns(row)))];
    this.tokens = [];
    this.rows.replaceChildren(...found.map((row) => this.row(row, rows.indexOf(row) + 1)));
    if (!columns.includes(this.colour)) this.colour = columns[columns.length - 1]; // what came last, such as advantages
    this.colours.replaceChildren(...(columns.length ? [choice("colour tokens by (c)", columns.map((name) => [name, name]), this.colour, (name) => this.paint(name))] : []));
    const folder = [of > rows.length && `${of - rows.length} more rows`, this.samples.omitted.length && `${this.samples.omitted.length} more files`].filter(Boolean);
    this.rest = folder.length ? `${folder.join(" and ")} in the run's folder` : "";
    this.paint(this.colour);
  }

  row(row, number) {
    const columns = tokenColumns(row);
    const entries = Object.entries(row).filter(([name]) => name !== "pieces" && !columns.includes(name) && !(row.pieces && WHOLE_TEXTS.includes(name)));
    const numbers = entries.filter(([, value]) => NUMBERS(value));
    const texts = entries.filter(([, value]) => !NUMBERS(value)).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]);
    const short = (text) => text.length <= SHORT && !text.includes("\n");
    const pieces = row.pieces || [];
    return el(
      "article", { class: pieces.join("").length > LONG ? "sample long" : "sample" },
      el("header", null, el("b", null, `#${number}`), ...numbers.map(([name, value]) => el("span", { class: "value", style: this.measured.has(name) ? shade(value, 1) : null }, `${name} ${Number(value.toPrecision(4))}`))),
      row.pieces && this.turns(row, columns),
      facts(texts.filter(([, text]) => short(text)).map(([name, text]) => [name, el("code", null, text)])),
      ...texts.filter(([, text]) => !short(text)).map(([name, text]) => [el("h4", null, name), el("pre", null, text)]).flat(),
    );
  }

  // The turns of a row. Pointing at a token, or going there by the arrow keys, says its numbers.
  turns(row, columns) {
    const said = el("output", { class: "note" }, "");
    const tokens = row.pieces.map((piece, n) => Object.assign(el("span", { class: piece === "" ? "empty" : /^\s*\n\s*$/.test(piece) ? "newline" : null }, String(piece)), { token: n }));
    this.tokens.push(...tokens.map((span, n) => ({ span, values: Object.fromEntries(columns.map((name) => [name, row[name][n]])) })));
    const mark = (span) => {
      for (const other of tokens) other.classList.toggle("marked", other === span);
      said.textContent = [`token ${span.token}`, ...columns.map((name) => `${name} ${valueText(row[name][span.token])}`)].join(" · ");
    };
    const move = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      const at = tokens.findIndex((span) => span.classList.contains("marked"));
      const next = tokens[at < 0 ? 0 : Math.min(Math.max(at + by, 0), tokens.length - 1)];
      if (next) mark(next);
      if (next) next.scrollIntoView({ block: "nearest" });
      event.preventDefault();
    };
    const body = el(
      "div", { class: "turns", tabindex: 0, role: "group", "aria-label": "tokens: arrow keys go from one to the next", onkeydown: move, onpointerover: (event) => "token" in event.target && mark(event.target) },
      ...turnsOf(row).map(({ who, from, to }) => el("div", { class: `turn ${who}` }, SPEAKERS[who] && el("span", { class: "who" }, SPEAKERS[who]), el("pre", { class: "tokens" }, ...tokens.slice(from, to)))),
    );
    return el("div", null, body, said);
  }

  paint(name) {
    this.colour = name;
    const values = this.tokens.map((token) => Number(token.values[name] ?? 0));
    const most = usual(values);
    this.tokens.forEach(({ span }, n) => span.setAttribute("style", shade(values[n], most)));
    const sides = [values.some((value) => value < 0) && `red ${valueText(-most)}`, values.some((value) => value > 0) && `blue ${valueText(most)}`].filter(Boolean);
    const scale = sides.length ? `${name}: ${sides.join(", ")}` : "";
    this.said.textContent = [scale, this.rest].filter(Boolean).join(" · ");
  }

  // The next column for the colours.
  next() {
    const buttons = [...this.colours.querySelectorAll("button")];
    const at = buttons.findIndex((each) => each.getAttribute("aria-pressed") === "true");
    if (buttons.length) buttons[(at + 1) % buttons.length].click();
  }
}

// The columns of a row that have a value for each of its tokens.
function tokenColumns(row) {
  const count = (row.pieces || []).length;
  return count ? Object.keys(row).filter((name) => name !== "pieces" && Array.isArray(row[name]) && row[name].length === count) : [];
}

// Tokens in a row that the policy wrote, or that it read: first the prompt, later what tools answered.
function turnsOf(row) {
  const count = row.pieces.length;
  if (!tokenColumns(row).includes("loss_mask")) return [{ who: "all", from: 0, to: count }];
  const found = [];
  row.loss_mask.forEach((wrote, n) => {
    const last = found[found.length - 1];
    const who = wrote ? "policy" : found.some((turn) => turn.who === "policy") ? "tool" : "prompt";
    if (last && last.who === who) last.to = n + 1;
    else found.push({ who, from: n, to: n + 1 });
  });
  return found;
}

// What all but the few largest stay below: one outlier would make the others pale.
function usual(values) {
  const sizes = values.map(Math.abs).filter((size) => size > 0).sort((a, b) => a - b);
  return sizes[Math.floor(sizes.length * 0.95)] || sizes[sizes.length - 1] || 1;
}

function valueText(value) {
  return NUMBERS(value) ? String(Number(value.toPrecision(4))) : String(value);
}

// Blue for more than nothing, red for less.
function shade(value, most) {
  const part = Math.round(Math.min(Math.abs(value) / most, 1) * 55);
  return part ? `background: color-mix(in srgb, var(${value < 0 ? "--less" : "--more"}) ${part}%, transparent)` : "";
}
