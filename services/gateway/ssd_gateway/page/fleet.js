/** The fleet: targets, their load, and the drafts that they are linked to, every two seconds. */

import { getJson } from "/page/api.js";
import { byId, make, say } from "/page/dom.js";
import { printable } from "/page/printable.js";

const EVERY_MS = 2000;

export class Fleet {
  #timer = null;
  #shown = false;

  constructor() {
    document.addEventListener("visibilitychange", () => this.#schedule());
  }

  show() {
    this.#shown = true;
    this.#schedule();
  }

  hide() {
    this.#shown = false;
    this.#schedule();
  }

  /** Nobody is asked while nobody looks. */
  #schedule() {
    clearTimeout(this.#timer);
    if (this.#shown && !document.hidden) this.#refresh();
  }

  async #refresh() {
    clearTimeout(this.#timer);
    try {
      const { targets } = await getJson("/ssd/fleet");
      byId("targets").replaceChildren(...targets.map(targetCard));
      byId("fleet-updated").textContent = `updated ${new Date().toLocaleTimeString()}`;
      say(byId("fleet-problem"), "");
    } catch (error) {
      say(byId("fleet-problem"), error.message);
    }
    clearTimeout(this.#timer);
    if (this.#shown && !document.hidden) this.#timer = setTimeout(() => this.#refresh(), EVERY_MS);
  }
}

function targetCard(target) {
  const state = make("span", { class: "state", "data-good": String(target.ready) }, target.ready ? "ready" : "not ready");
  const head = make("header", {}, make("h3", {}, shownText(target.address)), state);
  const built = [target.architecture, target.dtype, target.device, target.version && `version ${target.version}`];
  const model = make("p", { class: "hint" }, [target.model, ...built].filter(Boolean).map(shownText).join(" · "));
  const card = make("article", { class: "card target" }, head, model);
  if (target.problem) card.append(make("p", { class: "problem" }, shownText(target.problem)));
  if (target.ready) card.append(figures(target));
  card.append(target.endpoints.length ? linksTable(target.endpoints) : make("p", { class: "hint" }, "No drafts."));
  return card;
}

function figures(target) {
  const { used_kv_blocks: used, num_kv_blocks: all } = target;
  const meter = make("meter", { min: 0, max: all || 1, value: used, "aria-label": "KV blocks in use" });
  const most = target.max_num_seqs ? ` of ${target.max_num_seqs}` : "";
  return make(
    "dl",
    { class: "figures" },
    figure("Running", `${target.running}${most}`),
    figure("Waiting", target.waiting),
    figure("KV blocks", `${used} of ${all}`, meter),
    figure("Hit rate", percent(target.hit_rate)),
    figure("Acceptance", percent(target.acceptance)),
    figure("Tokens a round", target.tokens_per_round?.toFixed(2) ?? "–"),
  );
}

function figure(name, value, ...more) {
  return make("div", {}, make("dt", {}, name), make("dd", {}, String(value), ...more));
}

function linksTable(endpoints) {
  const columns = ["Draft", "State", "Model", "Planes", "Payoff", "Acceptance", "Sequences", "Reason"];
  const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
  const rows = endpoints.map((endpoint) => linkRow(endpoint, columns));
  const caption = make("caption", { class: "unseen" }, "Links to drafts");
  return make("table", { class: "links" }, caption, make("thead", {}, head), make("tbody", {}, ...rows));
}

function linkRow(endpoint, columns) {
  const good = ["up", "ready"].includes(endpoint.state);
  const cells = [
    shownText(endpoint.address),
    make("span", { class: "state", "data-good": String(good) }, shownText(endpoint.state)),
    shownText(endpoint.draft_name),
    shownText(planesText(endpoint.planes)),
    shownText(endpoint.payoff),
    percent(endpoint.acceptance),
    String(endpoint.open_sequences ?? "–"),
    shownText(endpoint.reason),
  ];
  return make("tr", {}, ...cells.map((cell, i) => make("td", { "data-name": columns[i] }, cell)));
}

/** How rows travel between the two: "features by nccl"; a plane that is not up says so. */
function planesText(planes) {
  return (planes ?? [])
    .map(({ stream, kind, state }) => `${stream} by ${kind}${state === "up" ? "" : ` (${state})`}`)
    .join(", ");
}

function shownText(text) {
  return printable(String(text ?? "")) || "–";
}

function percent(share) {
  return typeof share === "number" ? `${(100 * share).toFixed(0)} %` : "–";
}
