/** The race: one prompt and one seed in every mode, side by side, and whether the texts are equal. */

import { byId, make, oncePerFrame } from "/page/dom.js";
import { Generation } from "/page/generation.js";
import { statisticsText } from "/page/message.js";
import { fillLegend, shareBar, tokenSpan } from "/page/origins.js";
import { asDigits, asWhole, chosenModel, samplingFields } from "/page/settings.js";

const MODES = {
  off: "no speculation",
  sync: "a draft inside the target",
  ssd: "a draft that works ahead",
};

/** The column of a mode: its text as it comes, its speed, and its ratio to ``off``. */
class Lane {
  #count = 0;
  generation = null;
  error = null;
  rateOfOff = null;

  constructor(mode) {
    this.mode = mode;
    this.rate = make("strong", { class: "rate" }, "–");
    this.ratio = make("span", { class: "ratio" });
    this.problem = make("p", { class: "problem", role: "alert", hidden: true });
    this.text = make("div", { class: "body origins", tabindex: "0", role: "group", "aria-label": `Text of ${mode}` });
    this.foot = make("div", { class: "foot" });
    const head = make("header", {}, make("h3", {}, mode), make("span", { class: "hint" }, MODES[mode]));
    const speed = make("p", { class: "speed" }, this.rate, make("span", { class: "hint" }, "tokens/s"), this.ratio);
    const parts = [head, speed, this.problem, this.text, this.foot];
    this.node = make("section", { class: "card lane", "data-mode": mode, "aria-label": mode }, ...parts);
    this.draw = oncePerFrame(() => this.update());
  }

  get finished() {
    return Boolean(this.generation?.done && this.generation.finish);
  }

  async run(prompt, fields, seed) {
    this.generation = new Generation(`Race: ${this.mode}`);
    const messages = [{ role: "user", content: prompt }];
    const ofMode = { ...fields, speculation: { mode: this.mode } };
    this.node.classList.add("running");
    try {
      await this.generation.run(chosenModel(), messages, ofMode, { seed }, this.draw);
    } catch (error) {
      this.error = error.message;
    }
    this.node.classList.remove("running");
  }

  update() {
    const { generation, error, rateOfOff } = this;
    this.problem.textContent = error ?? "";
    this.problem.hidden = !error;
    if (!generation) return;
    this.text.append(...generation.tokens.slice(this.#count).map(tokenSpan));
    this.#count = generation.tokens.length;
    const statistics = generation.statistics();
    this.rate.textContent = statistics.rate?.toFixed(statistics.rate < 100 ? 1 : 0) ?? "–";
    this.ratio.textContent = this.finished && rateOfOff ? `${(statistics.rate / rateOfOff).toFixed(2)}× off` : "";
    const facts = statisticsText({ ...statistics, rate: null, seed: null }).map((text) => make("span", {}, text));
    this.foot.replaceChildren(shareBar(generation.tokens), make("p", { class: "facts" }, ...facts));
  }
}

export class Race {
  #lanes = [];
  #stopped = false;

  constructor() {
    fillLegend(byId("race-legend"));
    byId("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start();
    });
    byId("race-stop").addEventListener("click", () => this.#stop());
    byId("race").addEventListener("keydown", (event) => event.key === "Escape" && this.#stop());
    this.#reset();
  }

  #reset() {
    this.#lanes = Object.keys(MODES).map((mode) => new Lane(mode));
    this.#stopped = false;
    byId("lanes").replaceChildren(...this.#lanes.map((lane) => lane.node));
  }

  #stop() {
    this.#stopped = true;
    for (const lane of this.#lanes) lane.generation?.stop();
  }

  async #start() {
    if (!byId("race-stop").hidden) return;
    let fields, seed;
    try {
      seed = this.#seed();
      const most = asWhole(byId("race-tokens").value.trim(), "Tokens at most");
      fields = { ...samplingFields(), ...(most === undefined ? {} : { max_tokens: most }) };
    } catch (error) {
      this.#say(error.message, "bad");
      return;
    }
    this.#reset();
    this.#setRunning(true);
    this.#say("Running …", "");
    await this.#runAll(byId("race-prompt").value, fields, seed);
    this.#setRunning(false);
    this.#judge();
  }

  /** A seed that is made up is shown, so that the race can be run again. */
  #seed() {
    const given = asDigits(byId("race-seed").value.trim(), "Seed");
    const seed = given ?? String(crypto.getRandomValues(new Uint32Array(1))[0]);
    byId("race-seed").value = seed;
    return seed;
  }

  async #runAll(prompt, fields, seed) {
    const run = async (lane) => {
      if (!this.#stopped) await lane.run(prompt, fields, seed);
      this.#drawAll();
    };
    if (byId("race-order").value === "together") await Promise.all(this.#lanes.map(run));
    else for (const lane of this.#lanes) await run(lane);
  }

  #drawAll() {
    const off = this.#lanes[0];
    for (const lane of this.#lanes) {
      lane.rateOfOff = off.finished ? off.generation.statistics().rate : null;
      lane.update();
    }
  }

  #setRunning(running) {
    byId("race-stop").hidden = !running;
    byId("race-start").disabled = running;
  }

  #judge() {
    const unfinished = this.#lanes.filter((lane) => !lane.finished).map((lane) => lane.mode);
    if (unfinished.length) {
      this.#say(`Not compared: ${unfinished.join(" and ")} did not finish.`, "");
      return;
    }
    const ids = this.#lanes.map((lane) => lane.generation.ids);
    const counted = this.#lanes.every((lane, i) => ids[i].length === lane.generation.statistics().tokens);
    if (!counted) this.#say("Not compared: the server did not give every token's id.", "");
    else this.#sayEquality(firstDifference(ids));
  }

  #sayEquality(at) {
    if (at < 0) this.#say("equal texts", "good");
    else this.#say(`texts differ at token ${at + 1}`, "bad");
  }

  #say(text, kind) {
    byId("race-verdict").textContent = text;
    byId("race-verdict").dataset.kind = kind;
  }
}

/** Returns the index of the first token that is not the same in all lists; −1 where none is. */
export function firstDifference([first, ...others]) {
  const longest = Math.max(first.length, ...others.map((ids) => ids.length));
  for (let i = 0; i < longest; i += 1) {
    if (others.some((ids) => ids[i] !== first[i])) return i;
  }
  return -1;
}
