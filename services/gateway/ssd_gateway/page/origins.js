/** Where tokens came from: their names, colours, legend, and the share of each in an answer. */

import { make } from "/page/dom.js";
import { printable } from "/page/printable.js";

export const ORIGINS = {
  cache: ["cache", "Prepared by the draft before it was needed: nothing was waited for."],
  just_in_time: ["just in time", "Drafted after the outcome was known; the target waited for it."],
  ngram: ["n-gram", "Guessed from the text so far."],
  sync: ["sync", "Drafted by the model inside the target, between two rounds."],
  grammar: ["grammar", "No other token could come: the schema or grammar left no choice."],
  target: ["target", "The target's own token."],
};

export function nameOfOrigin(origin) {
  return ORIGINS[origin]?.[0] ?? (origin || "unknown origin");
}

/** Makes the span of a token: its colour and underline are set by its origin in app.css. */
export function tokenSpan([text, origin]) {
  const attributes = { class: "token", "data-origin": origin, title: nameOfOrigin(origin) };
  return make("span", attributes, printable(text));
}

export function fillLegend(node) {
  const entries = Object.entries(ORIGINS).map(([origin, [name, meaning]]) =>
    make("span", { class: "token", "data-origin": origin, title: meaning }, name),
  );
  node.replaceChildren(make("span", { class: "hint" }, "Tokens from"), ...entries);
}

/** Makes a bar whose parts are as wide as the share of each origin. */
export function shareBar(tokens) {
  const counts = Object.keys(ORIGINS)
    .map((origin) => [origin, tokens.filter((token) => token[1] === origin).length])
    .filter(([, count]) => count > 0);
  const label = counts.map(([origin, count]) => `${count} ${nameOfOrigin(origin)}`).join(", ");
  const bar = make("div", { class: "share", role: "img", "aria-label": `Tokens: ${label}`, title: label });
  for (const [origin, count] of counts) {
    const part = make("span", { "data-origin": origin });
    part.style.flexGrow = count;
    bar.append(part);
  }
  return bar;
}
