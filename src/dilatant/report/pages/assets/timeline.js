// Draws a timeline packed by page.py: rows of actions on a canvas, grouped by unit and replica.

const RULER = 22, LEAF = 20, GROUP = 30;
const NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };

function unpack(text, Kind) {
  return new Kind(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

function secondsText(seconds) {
  const [factor, unit] = seconds >= 1 || seconds === 0 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${Number((seconds * factor).toPrecision(3))} ${unit}`;
}

class Timeline {
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.columns = {};
    for (const [name, text] of Object.entries(data.rows)) {
      const Kind = name === "start" || name === "seconds" ? Float32Array : name === "stage" || name === "microbatch" ? Int32Array : Uint32Array;
      this.columns[name] = unpack(text, Kind);
    }
    this.firstRow = new Uint32Array(data.lanes.length + 1); // rows are sorted by lane
    for (const lane of this.columns.lane) this.firstRow[lane + 1]++;
    for (let lane = 0; lane < data.lanes.length; lane++) this.firstRow[lane + 1] += this.firstRow[lane];
    this.from = 0;
    this.span = data.span; // seconds of the whole width
    this.to = this.span;
    this.others = []; // charts that show the same seconds
    this.roots = buildTree(data);
    openSome(this.roots);
    this.find = (selector) => root.querySelector(selector);
    this.chart = this.find(".chart");
    this.strip = this.find(".strip");
    this.tip = this.find(".tip");
    this.marked = null; // flags by sample list: those that share a sample with what is pointed at
    this.selected = -1;
    this.readColours();
    this.listen();
    this.layout();
  }

  readColours() {
    this.shades = [];
    const probe = document.createElement("i");
    this.root.append(probe);
    const kinds = this.data.kinds;
    const read = (unit, kind) => {
      probe.className = `shade u${unit % 6} ${kind in NAMES ? kind : "other"}`;
      const style = getComputedStyle(probe);
      return { fill: style.backgroundColor, on: style.color };
    };
    for (let unit = 0; unit < this.data.units.length; unit++) this.shades.push(kinds.map((kind) => read(unit, kind)));
    this.plain = kinds.map((kind) => read(0, kind in NAMES ? "other" : kind)); // rows without a stage
    probe.remove();
    // A computed colour is resolved for the theme, which a custom property is not.
    const resolve = (name) => {
      this.root.style.outlineColor = `var(${name})`;
      const colour = getComputedStyle(this.root).outlineColor;
      this.root.style.outlineColor = "";
      return colour;
    };
    for (const name of ["ink", "soft", "line", "card", "idle", "accent"]) this[name] = resolve(`--${name}`);
  }

  shade(row) {
    const stage = this.columns.stage[row], kind = this.columns.kind[row];
    return stage < 0 ? this.plain[kind] : this.shades[this.data.stages[stage][0]][kind];
  }

  // Rows on display, from the open nodes of the tree, with their labels.
  layout() {
    this.lines = [];
    let y = RULER;
    const visit = (node, level) => {
      const height = node.children.length ? GROUP : LEAF;
      this.lines.push({ node, level, y, height });
      y += height;
      if (node.open) node.children.forEach((child) => visit(child, level + 1));
    };
    this.roots.forEach((root) => visit(root, 0));
    this.height = y + 6;
    const labels = this.find(".labels");
    const focused = labels.contains(document.activeElement) ? document.activeElement.textContent : null;
    labels.replaceChildren(...this.lines.map((line) => this.label(line)));
    if (focused !== null) [...labels.children].find((label) => label.textContent === focused)?.focus();
    this.find(".inner").style.height = `${this.height}px`;
    this.resize();
  }

  label(line) {
    const group = line.node.children.length > 0;
    const label = document.createElement(group ? "button" : "div");
    label.textContent = line.node.name;
    label.title = line.node.name;
    label.style.cssText = `top:${line.y}px;height:${line.height}px;line-height:${line.height}px;--level:${line.level}`;
    if (group) {
      label.type = "button";
      label.setAttribute("aria-expanded", String(line.node.open));
      label.addEventListener("click", () => { line.node.open = !line.node.open; this.layout(); });
    }
    return label;
  }

  setAll(open) {
    const visit = (node) => { node.open = open && node.children.length > 0; node.children.forEach(visit); };
    this.roots.forEach(visit);
    this.layout();
  }

  resize() {
    const rows = this.find(".rows");
    if (!rows.clientWidth) return;
    this.gutter = rows.clientWidth < 640 ? 124 : 208; // room for the labels
    this.root.style.setProperty("--gutter", `${this.gutter}px`);
    const printing = document.documentElement.dataset.printing === "yes";
    const width = rows.clientWidth, height = printing ? this.height : Math.min(rows.clientHeight, this.height);
    for (const [canvas, high, wide] of [[this.chart, height, width], [this.strip, 40, this.strip.clientWidth]]) {
      canvas.width = Math.round(wide * devicePixelRatio);
      canvas.height = Math.round(high * devicePixelRatio);
      if (canvas === this.chart) { canvas.style.width = `${wide}px`; canvas.style.height = `${high}px`; }
    }
    this.width = width;
    this.viewHeight = height;
    this.paint(); // at once: a resized canvas is blank, and printing does not wait for a frame
  }

  x(seconds) { return this.gutter + ((seconds - this.from) / (this.to - this.from)) * (this.width - this.gutter - 8); }
  time(x) { return this.from + ((x - this.gutter) / (this.width - this.gutter - 8)) * (this.to - this.from); }

  show(from, to) {
    const shortest = this.span * 1e-5;
    const span = Math.min(Math.max(to - from, shortest), this.span);
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(middle - span / 2, 0), this.span - span);
    this.to = this.from + span;
    for (const chart of [this, ...this.others]) {
      chart.from = this.from;
      chart.to = this.to;
      chart.draw();
    }
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  draw() {
    this.pending ||= requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.pending = 0;
    this.drawChart();
    this.drawStrip();
    this.root.dataset.from = this.from;
    this.root.dataset.to = this.to;
    const part = (this.to - this.from) / this.span;
    this.find(".window").textContent = part > 0.999
      ? `whole step, ${secondsText(this.data.seconds)}`
      : `${secondsText(this.from)} to ${secondsText(this.to)} (${secondsText(this.to - this.from)})`;
  }

  drawChart() {
    const pen = this.chart.getContext("2d");
    const top = this.find(".rows").scrollTop;
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    pen.clearRect(0, 0, this.width, this.viewHeight);
    pen.font = `11px ${getComputedStyle(document.documentElement).fontFamily}`;
    pen.textBaseline = "middle";
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, this.width - this.gutter - 8, this.viewHeight);
    pen.clip();
    for (const line of this.lines) {
      const y = line.y - top;
      if (y + line.height < RULER || y > this.viewHeight) continue;
      if (line.node.children.length) this.drawGroup(pen, line.node, y + 3, line.height - 6);
      else this.drawLane(pen, line.node.lanes[0], y + 2, line.height - 4);
    }
    pen.restore();
    this.drawRuler(pen);
  }

  drawRuler(pen) {
    pen.fillStyle = this.card;
    pen.fillRect(0, 0, this.width, RULER);
    const step = niceStep((this.to - this.from) / Math.max((this.width - this.gutter) / 110, 2));
    pen.textAlign = "left";
    for (let tick = Math.ceil(this.from / step) * step; tick <= this.to + step * 1e-6; tick += step) {
      const x = Math.round(this.x(tick)) + 0.5;
      pen.strokeStyle = this.line;
      pen.beginPath(); pen.moveTo(x, RULER - 6); pen.lineTo(x, this.viewHeight); pen.globalAlpha = 0.7; pen.stroke(); pen.globalAlpha = 1;
      pen.fillStyle = this.soft;
      if (x < this.width - 40) pen.fillText(secondsText(Number(tick.toPrecision(6))), x + 3, RULER / 2);
    }
    pen.strokeStyle = this.line;
    pen.strokeRect(-1, RULER - 0.5, this.width + 2, 0);
  }

  drawLane(pen, lane, y, height) {
    pen.fillStyle = this.idle;
    pen.fillRect(this.x(0), y, this.x(this.data.seconds) - this.x(0), height);
    const { start, seconds, samples, microbatch } = this.columns;
    let covered = -1; // right edge already painted, so that bars below a pixel are painted once
    for (let row = this.firstVisible(lane); row < this.firstRow[lane + 1]; row++) {
      if (start[row] > this.to) break;
      const left = this.x(start[row]), right = this.x(start[row] + seconds[row]);
      if (right - left < 0.7 && right < covered) continue;
      covered = Math.max(left + 1, right);
      const shade = this.shade(row), wide = Math.max(right - left - (right - left > 4 ? 0.75 : 0), 0.7);
      const dim = this.marked && !this.marked[samples[row]];
      pen.globalAlpha = dim ? 0.28 : 1;
      pen.fillStyle = shade.fill;
      pen.fillRect(left, y, wide, height);
      if (wide > 17 && microbatch[row] >= 0) {
        pen.fillStyle = shade.on;
        pen.textAlign = "center";
        const shown = (Math.max(left, this.gutter) + Math.min(right, this.width)) / 2;
        if (Math.min(right, this.width) - Math.max(left, this.gutter) > 17) pen.fillText(String(microbatch[row]), shown, y + height / 2 + 0.5);
      }
      pen.globalAlpha = 1;
      if (row === this.selected) { pen.strokeStyle = this.ink; pen.lineWidth = 1.5; pen.strokeRect(left, y, wide, height); pen.lineWidth = 1; }
    }
  }

  firstVisible(lane) {
    let low = this.firstRow[lane], high = this.firstRow[lane + 1];
    const { start, seconds } = this.columns;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] + seconds[middle] < this.from) low = middle + 1; else high = middle;
    }
    return low;
  }

  drawGroup(pen, node, y, height) {
    pen.fillStyle = this.idle;
    pen.fillRect(this.x(0), y, this.x(this.data.seconds) - this.x(0), height);
    const pixels = Math.max(Math.round(this.width - this.gutter - 8), 1);
    stack(pen, occupancy(this, node.lanes, this.from, this.to, pixels), this.gutter, y, height, pixels);
  }

  drawStrip() {
    const pen = this.strip.getContext("2d"), width = this.strip.clientWidth, pixels = Math.max(Math.round(width), 1);
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    pen.clearRect(0, 0, width, 40);
    this.whole = this.wholeWidth === pixels && this.whole ? this.whole
      : occupancy(this, this.data.lanes.map((_, lane) => lane), 0, this.span, pixels);
    this.wholeWidth = pixels;
    stack(pen, this.whole, 0, 0, 40, pixels);
    const left = (this.from / this.span) * width, right = (this.to / this.span) * width;
    pen.fillStyle = this.card;
    pen.globalAlpha = 0.72;
    pen.fillRect(0, 0, left, 40);
    pen.fillRect(right, 0, width - right, 40);
    pen.globalAlpha = 1;
    pen.strokeStyle = this.accent;
    pen.lineWidth = 2;
    pen.strokeRect(left + 1, 1, Math.max(right - left - 2, 1), 38);
  }

  // What lies under a point of the chart: the row of an action, and the line it belongs to.
  hit(event) {
    const box = this.chart.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top + this.find(".rows").scrollTop;
    if (x < this.gutter || event.clientY - box.top < RULER) return {};
    const line = this.lines.find((candidate) => y >= candidate.y && y < candidate.y + candidate.height);
    if (!line) return {};
    const seconds = this.time(x);
    if (line.node.children.length) return { line, seconds };
    const lane = line.node.lanes[0], { start, seconds: lasting } = this.columns;
    for (let row = this.firstVisible(lane); row < this.firstRow[lane + 1] && start[row] <= seconds; row++) {
      if (seconds <= start[row] + lasting[row]) return { line, seconds, row };
    }
    return { line, seconds };
  }

  describe(row) {
    const { lane, stage, kind, microbatch, samples, start, seconds } = this.columns;
    const letter = this.data.kinds[kind[row]], numbers = this.data.samples[samples[row]];
    const place = stage[row] < 0 ? null : this.data.stages[stage[row]];
    const what = place ? `${this.data.units[place[0]]}, replica ${place[1]}, stage ${place[2]}` : "";
    const shown = numbers.length > 12 ? `${numbers.slice(0, 12).join(", ")} … (${numbers.length})` : numbers.join(", ");
    return [
      letter in NAMES ? `${letter} ${NAMES[letter]}` : letter,
      what,
      microbatch[row] < 0 ? "" : `microbatch ${microbatch[row]}`,
      numbers.length ? `${numbers.length === 1 ? "sample" : "samples"} ${shown}` : "",
      `${secondsText(seconds[row])}, from ${secondsText(start[row])} to ${secondsText(start[row] + seconds[row])}`,
      ranksName(this.data.lanes[lane[row]].ranks),
    ].filter(Boolean);
  }

  describeGap({ line, seconds }) {
    const lanes = line.node.lanes, totals = new Map();
    for (const lane of lanes) {
      for (const [cause, lost] of Object.entries(this.data.idle[lane] ?? {})) totals.set(cause, (totals.get(cause) ?? 0) + lost / lanes.length);
    }
    const causes = [...totals].filter(([, lost]) => lost > 0).sort((one, other) => other[1] - one[1]).slice(0, 4);
    const share = (lost) => `${((100 * lost) / this.data.seconds).toFixed(1)} %`;
    const busy = lanes.reduce((sum, lane) => {
      for (let row = this.firstRow[lane]; row < this.firstRow[lane + 1]; row++) sum += this.columns.seconds[row];
      return sum;
    }, 0) / lanes.length;
    const heading = line.node.children.length ? `${line.node.name}: ${lanes.length} lines` : `${line.node.name}, idle here`;
    return [heading, `at ${secondsText(Math.max(seconds, 0))}`, `computes ${share(busy)} of the step`, ...causes.map(([cause, lost]) => `${cause} ${share(lost)}`)];
  }

  point(event) {
    const hit = this.hit(event);
    if (!hit.line || hit.seconds < 0 || hit.seconds > this.data.seconds) return this.unpoint();
    const lines = hit.row === undefined ? this.describeGap(hit) : this.describe(hit.row);
    this.tip.replaceChildren(...lines.flatMap((text, order) => {
      const element = document.createElement(order ? "span" : "b");
      element.textContent = text;
      return order ? [document.createElement("br"), element] : [element];
    }));
    const box = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
    this.tip.style.top = `${event.clientY + box.height + 24 > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16}px`;
    this.tip.style.visibility = "visible";
    if (hit.row !== this.pointed) {
      this.pointed = hit.row;
      if (!this.sought) this.mark(hit.row === undefined ? null : this.data.samples[this.columns.samples[hit.row]]);
    }
  }

  unpoint() {
    this.tip.style.visibility = "hidden";
    this.pointed = undefined;
    if (this.marked && !this.sought) this.mark(null);
  }

  // Dim everything that does not work on one of these samples.
  mark(numbers) {
    const wanted = new Set(numbers ?? []);
    this.marked = wanted.size ? this.data.samples.map((list) => list.some((sample) => wanted.has(sample))) : null;
    this.draw();
  }

  // Step through the actions of a lane with the keyboard; the text goes to the live region.
  select(direction) {
    const leaves = this.lines.filter((line) => !line.node.children.length);
    if (!leaves.length) return;
    const total = this.firstRow[this.data.lanes.length];
    this.selected = this.selected < 0 ? this.firstRow[leaves[0].node.lanes[0]] : (this.selected + direction + total) % total;
    const start = this.columns.start[this.selected], end = start + this.columns.seconds[this.selected];
    if (start < this.from || end > this.to) this.show(start - (this.to - this.from) / 2, start + (this.to - this.from) / 2);
    this.find(".spoken").textContent = this.describe(this.selected).join("; ");
    this.draw();
  }

  key(event) {
    const span = this.to - this.from;
    const actions = {
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6),
      ArrowLeft: () => this.show(this.from - span / 8, this.to - span / 8),
      ArrowRight: () => this.show(this.from + span / 8, this.to + span / 8),
      0: () => this.show(0, this.span), Home: () => this.show(0, this.span),
      n: () => this.select(1), p: () => this.select(-1),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  listen() {
    const rows = this.find(".rows");
    new ResizeObserver(() => this.resize()).observe(rows);
    rows.addEventListener("scroll", () => { this.unpoint(); this.draw(); });
    rows.addEventListener("keydown", (event) => { if (event.target === rows) this.key(event); });
    this.chart.addEventListener("wheel", (event) => {
      // A plain wheel scrolls the page until the chart has been clicked, so that nobody gets stuck on it.
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey && document.activeElement !== rows) return;
      event.preventDefault();
      const across = event.shiftKey ? event.deltaY || event.deltaX : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
      if (across) this.show(this.from + (across / 900) * (this.to - this.from), this.to + (across / 900) * (this.to - this.from));
      else this.zoom(Math.exp(Math.max(-0.5, Math.min(0.5, event.deltaY / 300))), this.time(event.clientX - this.chart.getBoundingClientRect().left));
    }, { passive: false });
    this.chart.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      rows.focus({ preventScroll: true });
      this.drag = { x: event.clientX, from: this.from, to: this.to };
      this.chart.setPointerCapture(event.pointerId);
    });
    this.chart.addEventListener("pointermove", (event) => {
      if (!this.drag) return this.point(event);
      const moved = ((this.drag.x - event.clientX) / (this.width - this.gutter - 8)) * (this.drag.to - this.drag.from);
      this.unpoint();
      this.show(this.drag.from + moved, this.drag.to + moved);
    });
    this.chart.addEventListener("pointerup", () => { this.drag = null; });
    this.chart.addEventListener("pointerleave", () => this.unpoint());
    this.chart.addEventListener("dblclick", () => this.show(0, this.span));
    const seconds = (event) => {
      const box = this.strip.getBoundingClientRect();
      return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) * this.span;
    };
    this.strip.addEventListener("pointerdown", (event) => { this.range = seconds(event); this.strip.setPointerCapture(event.pointerId); });
    this.strip.addEventListener("pointermove", (event) => {
      if (this.range !== undefined) this.show(Math.min(this.range, seconds(event)), Math.max(this.range, seconds(event)));
    });
    this.strip.addEventListener("pointerup", (event) => {
      const end = seconds(event), span = this.to - this.from;
      if (Math.abs(end - this.range) < this.span / 400) this.show(end - span / 2, end + span / 2);
      this.range = undefined;
    });
    const tool = (name, action) => this.find(`[data-tool="${name}"]`).addEventListener("click", action);
    tool("in", () => this.zoom(0.5));
    tool("out", () => this.zoom(2));
    tool("fit", () => this.show(0, this.span));
    tool("open", () => this.setAll(true));
    tool("close", () => this.setAll(false));
    this.find("input").addEventListener("input", (event) => {
      this.sought = event.target.value !== "";
      this.mark(this.sought ? [Number(event.target.value)] : null);
    });
  }

  repaint() { this.readColours(); this.whole = null; this.resize(); }
}
