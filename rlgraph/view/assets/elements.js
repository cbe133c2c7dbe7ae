"use strict";
// Elements are made here, and text is only ever set as text: nothing in this page is parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

// el("p", {class: "note"}, "text", child)
function el(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svg(name, attributes, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function button(text, attributes, onclick) {
  return el("button", { type: "button", ...attributes, onclick }, text);
}

// A button that is pressed or not, and calls back with its new state.
function toggle(text, pressed, title, onchange) {
  const made = button(text, { "aria-pressed": String(pressed), title }, () => {
    const now = made.getAttribute("aria-pressed") !== "true";
    made.setAttribute("aria-pressed", String(now));
    onchange(now);
  });
  return made;
}

// One of several: options are [value, text].
function choice(label, options, value, onchange) {
  const group = el("span", { class: "choice", role: "group", "aria-label": label });
  for (const [option, text] of options) {
    group.append(
      button(text, { "aria-pressed": String(option === value) }, (event) => {
        for (const other of group.children) other.setAttribute("aria-pressed", "false");
        event.currentTarget.setAttribute("aria-pressed", "true");
        onchange(option);
      }),
    );
  }
  return group;
}

// Rows of cells under headings; a heading that starts with ">" is of numbers.
function table(headings, rows, attributes) {
  const right = headings.map((heading) => heading.startsWith(">"));
  const cell = (kind, content, column) => el(kind, { class: right[column] ? "number" : null }, content);
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": `table: ${headings.map((text) => text.replace(/^>/, "")).join(", ")}` }, // keys scroll it
    el(
      "table",
      attributes,
      el("thead", null, el("tr", null, ...headings.map((text, n) => cell("th", text.replace(/^>/, ""), n)))),
      el("tbody", null, ...rows.map((row) => filled(el("tr", row.attributes), null, (row.cells || row).map((content, n) => cell("td", content, n))))),
    ),
  );
}

// A list of names and values; empty values are left out.
function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", null, ...shown.flatMap(([name, value]) => [el("dt", null, name), el("dd", null, value)]));
}

function three(number) {
  const digits = number < 9.995 ? 2 : number < 99.95 ? 1 : 0;
  return String(Number(number.toFixed(digits)));
}

// A unit's seconds and its name, for so many seconds.
function unitOf(seconds) {
  return [[0.9995, 1e-3, "ms"], [600, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"], [Infinity, 86400, "days"]].find(([below]) => seconds < below).slice(1);
}

function secondsText(seconds) {
  const [unit, name] = unitOf(seconds);
  return `${three(seconds / unit)} ${name}`;
}

const pen = document.createElement("canvas").getContext("2d");

// The width of a text in the font of charts.
function textWidth(text, size = 11) {
  pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

// A text cut to so many pixels; nothing where three letters have no room.
function fitted(text, room, size) {
  if (textWidth(text, size) <= room) return text;
  let count = text.length - 1;
  while (count > 2 && textWidth(`${text.slice(0, count)}…`, size) > room) count -= 1;
  return count > 2 ? `${text.slice(0, count)}…` : "";
}

function sizeText(size) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${three(size)} ${units[unit]}`;
}

// What a step works on, as its bar is coloured.
const WORK = {
  generate: "generates", score: "scores", update: "trains", weights: "moves weights", columns: "arranges rows",
  other: "no model",
};

function legend(works, others) {
  return el("p", { class: "legend" }, ...[...works.map((work) => [`work-${work}`, WORK[work]]), ...others].map(([kind, text]) => el("span", null, el("i", { class: `swatch ${kind}` }), text)));
}

// The versions of models that a step reads, as "policy@v"; a move of an engine has none.
function versions(step) {
  return Object.entries(step.models).flatMap(([model, version]) => (version ? [`${model}@${version}`] : []));
}

// What was measured of a run, in one line: its scores, how long it took, and unless it is one of several, how fast it
// was, and when it began.
function outcomeText(outcome, several) {
  const { took, speed, started, ...scores } = outcome;
  const reached = Object.entries(scores).map(([label, text]) => `${label} ${text}`).join(", ");
  const parts = [[reached, took && `in ${took}`].filter(Boolean).join(" "), ...(several ? [] : [speed, started])];
  return parts.filter(Boolean).join(", ");
}

// The line above all panels, which opens to its figures by name.
function headlineElement(text, pairs) {
  const figures = el("dl", null, ...pairs.map(([label, value]) => el("div", null, el("dt", null, label), el("dd", null, value))));
  return el("section", { id: "headline", "aria-label": "headline" }, el("details", { open: innerWidth > 600 && innerHeight > 600 }, el("summary", null, text), figures));
}

// Call `draw` each time that an element has another width. A hidden one has none, and is drawn when it is shown.
function onNewWidth(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth === width || !element.clientWidth) return;
    width = element.clientWidth;
    draw();
  }).observe(element);
}
