/** Calls of tools: put together from the pieces of a stream, shown as blocks, answered with results. */

import { CodeBlock } from "/page/code.js";
import { make } from "/page/dom.js";
import { indentedJson, isObject, readJson } from "/page/json.js";
import { printable } from "/page/printable.js";

/** Adds the pieces of a chunk to the calls; the first piece of a call has its id and its name. */
export function addCallPieces(calls, pieces) {
  for (const { index, id, function: piece } of pieces) {
    calls[index] ??= { id, name: piece.name, arguments: "", result: null };
    calls[index].arguments += piece.arguments ?? "";
  }
}

/** A call that was cut short has arguments that no server would read. */
export function isWhole(call) {
  return !call.arguments.trim() || isObject(readJson(call.arguments).value);
}

/** Returns an answer as the API takes it: with its calls, and a message for the result of each. */
export function answerToSend({ content, calls = [] }) {
  const whole = calls.filter(isWhole);
  if (!whole.length) return content ? [{ role: "assistant", content }] : [];
  const told = whole.map(({ id, name, arguments: given }) => ({
    id,
    type: "function",
    function: { name, arguments: given },
  }));
  const results = whole.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }));
  return [{ role: "assistant", content: content || null, tool_calls: told }, ...results];
}

/** The calls of an answer: a block for each, and a button that sends their results. */
export class CallsView {
  calls = [];
  #blocks = [];

  /** ``onSend`` is called when the results are to be sent. */
  constructor(onSend) {
    this.send = make("button", { class: "primary" }, "Send results");
    this.node = make("form", { class: "calls", hidden: true }, make("div", { class: "actions" }, this.send));
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      onSend();
    });
  }

  update(calls, running) {
    this.calls = calls;
    for (const call of calls.slice(this.#blocks.length)) this.#add(call);
    this.#blocks.forEach((block, i) => block.update(calls[i], running));
    this.node.hidden = !calls.length;
    this.send.hidden = running || !calls.some(isWhole);
  }

  /** Takes the results as they stand in the fields. */
  keepResults() {
    this.calls.forEach((call, i) => (call.result = this.#blocks[i].result.value));
  }

  #add(call) {
    const block = new CallBlock(call);
    this.#blocks.push(block);
    this.send.parentNode.before(block.node);
  }
}

class CallBlock {
  constructor(call) {
    const name = printable(call.name);
    this.arguments = new CodeBlock("arguments");
    this.result = make("textarea", { rows: "2", placeholder: "What the tool answers" });
    this.result.value = call.result ?? "";
    this.field = make("label", { class: "field" }, "Result", this.result);
    this.cut = make("p", { class: "hint" }, "Cut short: not the whole call. It is left out of the next request.");
    const head = make("h3", {}, "Call of ", make("code", {}, name));
    const parts = [head, this.arguments.node, this.field, this.cut];
    this.node = make("section", { class: "call", role: "group", "aria-label": `Call of ${name}` }, ...parts);
  }

  update(call, running) {
    const whole = running || isWhole(call);
    this.arguments.update(indentedJson(call.arguments));
    this.field.hidden = running || !whole;
    this.cut.hidden = whole;
  }
}
