/** A block of code: its language, a button that copies it, and its text, which may grow. */

import { copyButton, make } from "/page/dom.js";
import { printable } from "/page/printable.js";

export class CodeBlock {
  #code = make("code");

  constructor(language, text = "") {
    const head = make("div", { class: "code-head" }, make("span", {}, language));
    head.append(copyButton(() => this.#code.textContent));
    this.node = make("div", { class: "code" }, head, make("pre", { tabindex: "0" }, this.#code));
    this.update(text);
  }

  update(text) {
    const shown = printable(text);
    if (shown !== this.#code.textContent) this.#code.textContent = shown;
  }
}
