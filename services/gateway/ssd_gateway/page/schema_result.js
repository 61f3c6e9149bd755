/** Answers that were held to a JSON schema: their text as code, and what is known of it at its end. */

import { CodeBlock } from "/page/code.js";
import { make } from "/page/dom.js";
import { indentedJson, readJson } from "/page/json.js";
import { printable } from "/page/printable.js";

/** The rendered view of a text that is JSON: one block of code that grows. */
export class JsonView {
  constructor(node) {
    this.block = new CodeBlock("json");
    node.classList.add("json-text");
    node.append(this.block.node);
  }

  update(text) {
    this.block.update(text);
  }
}

/** Makes the nodes that tell what an answer has come to; none for one that broke off. */
export function schemaResult({ content, statistics }) {
  const { finish, stopReason } = statistics;
  if (finish === "length") return [verdict("Cut short: not the whole text.", "")];
  if (finish === "stopped") return [verdict("Stopped: not the whole text.", "")];
  if (finish !== "stop") return [];
  if (typeof stopReason === "string") return [verdict("Cut short at a stop string: not the whole text.", "")];
  const { problem } = readJson(content);
  if (problem) return [verdict(`Not valid JSON: ${printable(problem)}`, "bad")];
  const text = "Valid JSON. It follows the schema: the server held the text to it.";
  return [verdict(text, "good"), new CodeBlock("result", indentedJson(content)).node];
}

function verdict(text, kind) {
  return make("p", { class: "verdict", "data-kind": kind }, text);
}
