/** The timeline of a request: bars of target and drafts on one clock, rounds marked by their look-up. */

import { getJson } from "/page/api.js";
import { byId, counted, make, makeSvg, say } from "/page/dom.js";
import { nameOfOrigin } from "/page/origins.js";
import { recentGenerations } from "/page/generation.js";

const LONGEST = 120; // seconds that are looked back
const MOST_EVENTS = 4000; // of those drawn; the table has all of them
const [LANE, BAR, MARKS, AXIS] = [74, 22, 26, 26]; // heights
const RESULTS = { hit: "hit", late: "late", miss_length: "miss", miss_token: "miss", stale: "miss" };
const SHAPES = {
  hit: (x, y) => makeSvg("circle", { cx: x, cy: y, r: 4.5 }),
  late: (x, y) => makeSvg("path", { d: `M${x} ${y - 5.5}l5.5 10h-11z` }),
  miss: (x, y) => makeSvg("path", { d: `M${x - 4.5} ${y - 4.5}l9 9m0-9l-9 9` }),
};
const BARS = ["forward", "prefill", "draft", "wait"];
const INSTANTS = ["push", "launch", "outcome"];
const LEGEND = [
  ["target", "forward", "target's forward"],
  ["draft", "forward", "draft's forward"],
  ["target", "prefill", "prefill"],
  ["target", "draft", "drafting inside the target"],
  ["target", "wait", "waiting"],
];

export class Timeline {
  #tracks = [];
  #scale = null; // pixels for a millisecond; null fits all

  constructor() {
    this.chart = byId("timeline-chart");
    byId("timeline-request").addEventListener("change", () => this.#load());
    byId("timeline-reload").addEventListener("click", () => this.#load());
    byId("zoom-in").addEventListener("click", () => this.#zoom(1.6));
    byId("zoom-out").addEventListener("click", () => this.#zoom(1 / 1.6));
    byId("zoom-fit").addEventListener("click", () => this.#zoom(null));
    this.chart.addEventListener("keydown", (event) => {
      const factor = { "+": 1.6, "=": 1.6, "-": 1 / 1.6, 0: null }[event.key];
      if (factor !== undefined) this.#zoom(factor);
    });
    addEventListener("resize", () => this.#scale === null && this.#draw());
    fillLegend(byId("timeline-legend"));
  }

  show() {
    const recent = recentGenerations();
    const options = recent.map((generation, i) => make("option", { value: String(i) }, generation.name));
    byId("timeline-request").replaceChildren(...options);
    this.#load();
  }

  async #load() {
    const generation = recentGenerations()[Number(byId("timeline-request").value)];
    this.#tracks = [];
    let problem = "Send a message or run a race first: this view shows the last requests of this page.";
    if (generation) problem = await this.#fetch(generation);
    say(byId("timeline-problem"), problem);
    this.#scale = null;
    this.#draw();
  }

  /** Fetches the tracks of a generation; returns what is wrong. */
  async #fetch(generation) {
    const { target, sequence } = generation.metrics.ssd;
    const seconds = Math.min(Math.ceil((Date.now() - generation.startedAt) / 1000) + 5, LONGEST);
    const query = new URLSearchParams({ target, sequence, seconds });
    try {
      const answer = await getJson(`/ssd/timeline?${query}`);
      this.#tracks = during(answer.tracks, sequence);
      return answer.problem || (this.#tracks.length ? "" : "There are no events of this request any more.");
    } catch (error) {
      return error.message;
    }
  }

  #zoom(factor) {
    const { scrollLeft, clientWidth } = this.chart;
    const middle = (scrollLeft + clientWidth / 2) / this.chart.scrollWidth;
    this.#scale = factor === null ? null : this.#pixels() * factor;
    this.#draw();
    this.chart.scrollLeft = middle * this.chart.scrollWidth - clientWidth / 2;
  }

  #span() {
    const ends = this.#tracks.flatMap(({ events }) => events.map((e) => e.begin_ms + e.duration_ms));
    const begins = this.#tracks.flatMap(({ events }) => events.map((e) => e.begin_ms));
    const least = begins.reduce((a, b) => Math.min(a, b), Infinity);
    return [least, Math.max(ends.reduce((a, b) => Math.max(a, b), -Infinity) - least, 1)];
  }

  #pixels() {
    return this.#scale ?? (this.chart.clientWidth - 24) / this.#span()[1];
  }

  #draw() {
    const some = this.#tracks.length > 0;
    for (const id of ["timeline-chart", "timeline-legend", "timeline-details"]) byId(id).hidden = !some;
    byId("timeline-summary").textContent = some ? summary(this.#tracks) : "";
    this.chart.replaceChildren();
    if (!some) return;
    const [begin, length] = this.#span();
    const most = 30000 / length; // browsers do not draw pictures that are wider
    this.chart.append(names(this.#tracks), picture(this.#tracks, begin, length, Math.min(this.#pixels(), most)));
    byId("timeline-table").replaceChildren(table(this.#tracks, begin));
  }
}

function fillLegend(node) {
  const bars = LEGEND.map(([role, kind, name]) => {
    const box = makeSvg("rect", { class: `bar ${kind}`, x: 1, y: 2, width: 16, height: 10, rx: 2 });
    const icon = makeSvg("svg", { width: 18, height: 14, "aria-hidden": "true", "data-role": role }, box);
    return make("span", { class: "key" }, icon, name);
  });
  const marks = Object.keys(SHAPES).map((result) => {
    const icon = makeSvg("svg", { width: 14, height: 14, "aria-hidden": "true" }, mark(result, 7, 7));
    return make("span", { class: "key" }, icon, result);
  });
  const tick = makeSvg("line", { class: "instant", x1: 7, x2: 7, y1: 2, y2: 12 });
  const icon = makeSvg("svg", { width: 14, height: 14, "aria-hidden": "true" }, tick);
  const message = make("span", { class: "key", title: INSTANTS.join(", ") }, icon, "message");
  node.replaceChildren(...bars, message, ...marks);
}

function mark(result, x, y) {
  const shape = SHAPES[result](x, y);
  shape.setAttribute("class", `mark ${result}`);
  return shape;
}

/** Returns the tracks with what happened while the target served a sequence; 0 is not known. */
function during(tracks, sequence) {
  if (!Number(sequence)) return tracks;
  const events = tracks.filter((track) => track.role === "target").flatMap((track) => track.events);
  const own = events.filter((event) => Number(event.sequence) === Number(sequence));
  const from = own.reduce((least, event) => Math.min(least, event.begin_ms), Infinity);
  const to = own.reduce((most, event) => Math.max(most, event.begin_ms + event.duration_ms), -Infinity);
  const within = (event) => event.begin_ms + event.duration_ms >= from && event.begin_ms <= to;
  const cut = tracks.map((track) => ({ ...track, events: track.events.filter(within) }));
  return cut.filter((track) => track.events.length);
}

/** The tracks' names stay where they are while the picture is scrolled. */
function names(tracks) {
  const nodes = tracks.map(({ name, events }, i) => {
    const left = events.length > MOST_EVENTS ? ` (the first ${MOST_EVENTS} of ${events.length} events)` : "";
    const node = make("div", { class: "track-name" }, name + left);
    node.style.top = `${AXIS + i * LANE + 3}px`;
    return node;
  });
  return make("div", { class: "track-names" }, ...nodes);
}

function picture(tracks, begin, length, scale) {
  const [width, height] = [length * scale + 24, AXIS + tracks.length * LANE];
  const x = (ms) => 12 + (ms - begin) * scale;
  const lanes = tracks.map((track, i) => lane(track, x, scale, AXIS + i * LANE));
  const attributes = { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary(tracks) };
  return makeSvg("svg", attributes, ...axis(length, scale, height), ...lanes);
}

/** Lines at round numbers of milliseconds, about a hundred pixels apart. */
function axis(length, scale, height) {
  const rough = 100 / scale;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const lines = [];
  for (let ms = 0; ms <= length; ms += step) {
    const x = 12 + ms * scale;
    lines.push(makeSvg("line", { class: "grid", x1: x, x2: x, y1: 18, y2: height }));
    if (x + 50 > length * scale + 24) continue; // its number would be cut
    lines.push(makeSvg("text", { class: "tick", x: x + 3, y: 13 }, `${Number(ms.toPrecision(6))} ms`));
  }
  return lines;
}

function lane({ role, events }, x, scale, top) {
  const drawn = events.slice(0, MOST_EVENTS);
  const nodes = [makeSvg("line", { class: "grid", x1: 0, x2: "100%", y1: top, y2: top })];
  for (const event of drawn.filter((e) => e.kind === "round")) nodes.push(round(event, x, scale, top));
  for (const event of drawn.filter((e) => BARS.includes(e.kind))) nodes.push(bar(event, x, scale, top));
  for (const event of drawn.filter((e) => INSTANTS.includes(e.kind))) nodes.push(instant(event, x, top));
  return makeSvg("g", { class: "track", "data-role": role }, ...nodes);
}

function bar(event, x, scale, top) {
  const width = Math.max(event.duration_ms * scale, 1);
  const attributes = { class: `bar ${event.kind}`, x: x(event.begin_ms), y: top + MARKS + 4, width, height: BAR, rx: 2 };
  return makeSvg("rect", attributes, makeSvg("title", {}, described(event)));
}

/** A round is a line from its begin to its end, where a mark says what its look-up found. */
function round(event, x, scale, top) {
  const [from, to] = [x(event.begin_ms), x(event.begin_ms + event.duration_ms)];
  const y = top + MARKS + BAR + 14;
  const nodes = [makeSvg("title", {}, described(event))];
  nodes.push(makeSvg("line", { class: "round", x1: from + 1, x2: Math.max(to - 1, from + 2), y1: y, y2: y }));
  const result = RESULTS[event.look_up];
  if (result) nodes.push(mark(result, to, y));
  return makeSvg("g", { "data-look-up": event.look_up }, ...nodes);
}

function instant(event, x, top) {
  const at = x(event.begin_ms);
  const y = top + MARKS + BAR + 8;
  const attributes = { class: `instant ${event.kind}`, x1: at, x2: at, y1: y, y2: y + 9 };
  return makeSvg("line", attributes, makeSvg("title", {}, described(event)));
}

function described(event) {
  const parts = [`${event.kind} at ${event.begin_ms.toFixed(1)} ms`, `${event.duration_ms.toFixed(2)} ms long`];
  if (event.round) parts.push(`round ${event.round}`);
  if (event.rows) parts.push(`${event.rows} rows`);
  if (event.tokens) parts.push(`${event.accepted} of ${event.tokens} tokens right`);
  if (event.origin) parts.push(nameOfOrigin(event.origin));
  if (event.look_up) parts.push(event.look_up.replace("_", ": "));
  return parts.join(", ");
}

function summary(tracks) {
  const found = tracks.flatMap(({ events }) => events.map((event) => RESULTS[event.look_up]));
  const count = (result) => found.filter((each) => each === result).length;
  const rounds = tracks.flatMap(({ events }) => events.filter((event) => event.kind === "round")).length;
  const names = tracks.map(({ name }) => name).join(", ");
  return `${names}: ${counted(rounds, "round", "rounds")}, ${counted(count("hit"), "hit", "hits")}, ${count("late")} late, ${counted(count("miss"), "miss", "misses")}.`;
}

function table(tracks, begin) {
  const columns = ["Track", "Kind", "Begin (ms)", "Duration (ms)", "Round", "Tokens", "Accepted", "Origin", "Look-up"];
  const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
  const rows = tracks.flatMap(({ name, events }) => events.map((event) => tableRow(name, event, begin)));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

function tableRow(name, event, begin) {
  const { kind, round, tokens, accepted, origin, look_up: lookUp } = event;
  const times = [(event.begin_ms - begin).toFixed(2), event.duration_ms.toFixed(2)];
  const cells = [name, kind, ...times, round, tokens, accepted, origin && nameOfOrigin(origin), lookUp];
  return make("tr", {}, ...cells.map((cell) => make("td", {}, String(cell ?? ""))));
}
