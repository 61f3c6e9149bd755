/** Messages of a conversation as they are shown: questions that can be edited, answers that grow. */

import { copyButton, counted, make } from "/page/dom.js";
import { MarkdownView } from "/page/markdown.js";
import { shareBar, tokenSpan } from "/page/origins.js";
import { printable } from "/page/printable.js";
import { JsonView, schemaResult } from "/page/schema_result.js";
import { CallsView } from "/page/tool_calls.js";

/** Makes a question; ``onEdit`` gets the text that replaces it. */
export function questionNode(message, onEdit) {
  const text = make("div", { class: "plain" }, printable(message.content));
  const edit = make("button", { type: "button", class: "quiet", click: () => open() }, "Edit");
  const actions = make("div", { class: "actions" }, edit);
  const node = make("article", { class: "message question", "aria-label": "You" }, text, actions);
  function open() {
    const editor = editForm(message.content, onEdit, () => {
      node.replaceChildren(text, actions);
      edit.focus();
    });
    node.replaceChildren(editor);
    editor.elements.text.focus();
  }
  return node;
}

function editForm(content, onEdit, onCancel) {
  const area = make("textarea", { name: "text", rows: "3", "aria-label": "Edit the message" });
  area.value = content;
  const cancel = make("button", { type: "button", click: onCancel }, "Cancel");
  const actions = make("div", { class: "actions" }, cancel, make("button", { class: "primary" }, "Send"));
  const form = make("form", { class: "edit" }, area, actions);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim()) onEdit(area.value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") onCancel();
    if (sends(event)) form.requestSubmit();
    if (event.key === "Escape" || sends(event)) event.preventDefault();
  });
  return form;
}

/** Enter sends, except while letters are being composed, and in the next line. */
export function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target.tagName === "TEXTAREA";
}

/** An answer: rendered or by origins, with its thoughts above, and its calls, its result, its
 * statistics or its error below. */
export class AnswerView {
  #shown = null;
  #count = 0;

  constructor(message, onRegenerate, onResults) {
    this.message = message;
    this.thoughts = new ThoughtsView();
    this.calls = new CallsView(onResults);
    this.result = make("div", { class: "result" });
    this.body = make("div", { class: "body" });
    this.foot = make("div", { class: "foot" });
    this.problem = make("p", { class: "problem", role: "alert", hidden: true });
    this.again = make("button", { type: "button", class: "quiet", click: onRegenerate }, "Regenerate");
    const actions = make("div", { class: "actions" }, copyButton(() => printable(message.content)), this.again);
    const { thoughts, body, calls, result, problem, foot } = this;
    const parts = [thoughts.node, body, calls.node, result, problem, foot, actions];
    this.node = make("article", { class: "message answer", "aria-label": "Answer" }, ...parts);
  }

  /** Shows what the message holds by now, in the way that was chosen. */
  update(shown, running) {
    if (shown !== this.#shown) this.#begin(shown);
    if (shown === "origins") this.#appendTokens();
    else this.rendered.update(this.message.content);
    this.thoughts.update(this.message.thoughts ?? "");
    this.calls.update(this.message.calls ?? [], running);
    this.result.replaceChildren(...(this.message.json && !running ? schemaResult(this.message) : []));
    this.node.setAttribute("aria-busy", String(running));
    this.node.classList.toggle("running", running);
    this.again.disabled = running;
    this.problem.textContent = this.message.error ?? "";
    this.problem.hidden = !this.message.error;
    this.foot.replaceChildren(...footer(this.message));
  }

  #begin(shown) {
    this.#shown = shown;
    this.#count = 0;
    this.body.replaceChildren();
    this.body.className = `body ${shown}`;
    if (shown === "rendered") this.rendered = new (this.message.json ? JsonView : MarkdownView)(this.body);
  }

  #appendTokens() {
    const { tokens } = this.message;
    this.body.append(...tokens.slice(this.#count).map(tokenSpan));
    this.#count = tokens.length;
  }
}

/** What a model thought before it answered: folded away until somebody wants to read it. */
class ThoughtsView {
  constructor() {
    this.text = make("div", { class: "plain" });
    this.node = make("details", { class: "thoughts", hidden: true }, make("summary", {}, "Thoughts"), this.text);
  }

  update(thoughts) {
    this.text.textContent = printable(thoughts);
    this.node.hidden = !thoughts;
  }
}

function footer(message) {
  if (!message.tokens.length) return [];
  const facts = statisticsText(message.statistics).map((text) => make("span", {}, text));
  return [shareBar(message.tokens), make("p", { class: "facts" }, ...facts)];
}

/** Returns the statistics as short facts; what the server did not say is left out. */
export function statisticsText(s) {
  const drafted = s.mode === "ssd" || s.hits + s.late + s.misses > 0;
  const ofDraft = (value) => (drafted ? value : null);
  const facts = [
    [s.rate, () => `${s.rate.toFixed(s.rate < 100 ? 1 : 0)} tokens/s`],
    [s.first, () => `first token ${Math.round(s.first)} ms`],
    [s.tokens, () => counted(s.tokens, "token", "tokens")],
    [ofDraft(s.cached), () => `${s.cached} from cache`],
    [ofDraft(s.hits), () => counted(s.hits, "hit", "hits")],
    [ofDraft(s.late), () => `${s.late} late`],
    [ofDraft(s.misses), () => counted(s.misses, "miss", "misses")],
    [s.prefix || null, () => `${s.prefix} prompt tokens cached`],
    [s.mode, () => `mode ${s.mode}`],
    [s.seed, () => `seed ${s.seed}`],
    [s.moved || null, () => `moved to another target ${s.moved}×`],
    [ENDS[s.finish] ?? null, () => ENDS[s.finish]],
  ];
  return facts.filter(([value]) => value !== null && value !== undefined).map(([, text]) => text());
}

const ENDS = { length: "cut at the most tokens allowed", stopped: "stopped" };
