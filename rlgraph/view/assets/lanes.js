// Charts over time that share one axis: bars in lanes, memory as stacked areas, engines as bands.

const ROW = 26;
const AXIS = 22;

// A scale from seconds to pixels.
function scale(from, to, left, right) {
  return (seconds) => left + ((seconds - from) / (to - from || 1)) * (right - left);
}

const partClass = (part) => `part-${part.replaceAll(" ", "-")}`;

function ticks(from, to, count) {
  const step = 10 ** Math.floor(Math.log10((to - from) / count || 1));
  const size = [1, 2, 5, 10].map((factor) => factor * step).find((each) => (to - from) / each <= count) || step * 10;
  const found = [];
  for (let at = Math.ceil(from / size - 1e-9) * size; at <= to + 1e-9; at += size) found.push(at);
  return found;
}

class TimeChart {
  // from, to: seconds, or without a unit; labels: what will stand before the lanes
  constructor(pixels, from, to, labels, guessed = false) {
    this.zoom = pixels > 2400 ? 1.6 : 1; // on a wall
    const width = pixels / this.zoom;
    this.left = Math.min(Math.max(60, ...labels.map((label) => textWidth(label))) + 14, width * 0.34);
    Object.assign(this, { width, from, to, guessed, y: AXIS, parts: [] });
    [this.head, this.arrow] = arrowhead();
    this.x = scale(from, to, this.left, width - 8);
  }

  add(...parts) {
    this.parts.push(...parts.flat());
  }

  heading(text) {
    this.add(svg("text", { x: 4, y: this.y + 17, class: "heading" }, fitted(text, (this.width - 8) / 1.1, 12))); // it is bold
    this.y += 24;
  }

  label(text, height) {
    this.add(svg("text", { x: this.left - 8, y: this.y + height / 2 + 4, class: "label" }, fitted(text, this.left - 10), svg("title", null, text)));
  }

  // bars: [{start, end, text, about, kind, data, faint, onclick}]
  lane(text, bars, high = ROW) {
    const gap = high / 13; // above and below the lane
    if (text) this.label(text, high);
    this.add(svg("rect", { class: "track", x: this.left, y: this.y + gap, width: this.width - 8 - this.left, height: high - 2 * gap }));
    for (const bar of bars) {
      const [x, end] = [Math.max(this.x(bar.start), this.left), Math.min(this.x(bar.end), this.width - 8)];
      if (end < this.left || x > this.width - 8 || end < x) continue;
      const width = Math.max(end - x, 1.5);
      const events = bar.onclick && {
        tabindex: 0, role: "button", onclick: bar.onclick, onkeydown: (event) => event.key === "Enter" && bar.onclick(),
      };
      this.add(
        svg(
          "g",
          { class: `bar work-${bar.kind}${bar.faint ? " faint" : ""}`, ...bar.data, ...events },
          svg("rect", { x, y: this.y + 1.5 * gap, width, height: high - 3 * gap, rx: Math.min(3, width / 3, high / 6) }),
          high > 12 && svg("text", { x: x + 4, y: this.y + high / 2 + 4 }, fitted(bar.text, width - 7, 10.5)),
          svg("title", null, bar.about),
        ),
      );
    }
    this.y += high;
  }

  // marks: [seconds, name, about], drawn over all that stands below so many pixels
  marks(top, marks, kind) {
    const shown = marks.filter(([at]) => at > this.from && at < this.to).sort(([a], [b]) => a - b);
    const ends = [...shown.slice(1).map(([at]) => this.x(at)), this.width];
    shown.forEach(([at, name, about], n) => {
      const x = this.x(at);
      this.add(svg("line", { class: `mark ${kind}`, x1: x, x2: x, y1: top, y2: this.y }, svg("title", null, about)));
      if (x + 6 + textWidth(name) < ends[n]) this.add(svg("text", { class: "small", x: x + 3, y: top + 10 }, name));
    });
  }

  // moments: [{start, end, parts: {part: bytes}, about}]
  stack(text, moments, parts, capacity) {
    const height = 110;
    const top = Math.max(capacity, ...moments.map((moment) => Object.values(moment.parts).reduce((a, b) => a + b, 0))) * 1.06;
    const y = (bytes) => this.y + height - (bytes / top) * (height - 8);
    this.label(text, height);
    for (const moment of moments) {
      const [x, end] = [Math.max(this.x(moment.start), this.left), Math.min(this.x(moment.end), this.width - 8)];
      if (end <= x) continue;
      let below = 0;
      parts.forEach((part) => {
        const bytes = moment.parts[part] || 0;
        if (!bytes) return;
        const about = `${part}: ${sizeText(bytes)}, ${moment.about}`;
        this.add(svg("rect", { class: partClass(part), x, width: end - x + 0.4, y: y(below + bytes), height: y(below) - y(below + bytes) }, svg("title", null, about)));
        below += bytes;
      });
    }
    this.add(
      svg("line", { class: "capacity", x1: this.left, x2: this.width - 8, y1: y(capacity), y2: y(capacity) }),
      svg("text", { class: "small", x: this.left + 4, y: y(capacity) - 4 }, `${sizeText(capacity)} of a device`),
    );
    this.y += height + 6;
  }

  // arrows: [{x1, y1, x2, y2, text, faint}] in pixels, drawn over the lanes
  arrows(arrows) {
    for (const { x1, y1, x2, y2, text, faint } of arrows) {
      if (faint && y1 === y2 && x2 - x1 < 12) continue; // too short to be seen among all
      const bend = Math.max(18, Math.abs(x2 - x1) / 3);
      const up = y1 === y2 ? 20 : 0; // an arrow within a lane is an arc over it
      const path = `M${x1} ${y1}C${x1 + bend} ${y1 - up} ${x2 - bend} ${y2 - up} ${x2} ${y2}`;
      this.add(svg("path", { class: faint ? "flow faint" : "flow", d: path, "marker-end": this.arrow }, svg("title", null, text)));
    }
  }

  // Ticks that are round in the unit that all of them have.
  draw(name) {
    const [size, unit] = this.guessed ? [1, ""] : unitOf(this.to - this.from);
    const marks = ticks(0, (this.to - this.from) / size, Math.max(2, (this.width - this.left) / 90)).map((at) => {
      const x = this.x(this.from + at * size);
      const said = at ? `${three(at)} ${unit}`.trim() : "0";
      const clipped = x + 3 + textWidth(said) > this.width;
      return [svg("line", { class: "tick", x1: x, x2: x, y1: AXIS - 4, y2: this.y }), svg("text", { class: "small", x: clipped ? x - 3 : x + 3, y: 13, "text-anchor": clipped ? "end" : null }, said)];
    });
    return svg("svg", { class: "time", width: this.width * this.zoom, height: (this.y + 4) * this.zoom, viewBox: `0 0 ${this.width} ${this.y + 4}`, role: "group", "aria-label": name }, this.head, ...marks.flat(), ...this.parts);
  }
}
