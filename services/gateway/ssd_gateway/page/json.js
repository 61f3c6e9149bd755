/** JSON text: read, and laid out over lines. */

const DEEPEST = 40; // levels that are indented: a model may nest without end
const PARTS = /"(?:[^"\\]+|\\[^])*"?|[{}[\],:]|[^\s{}[\],:"]+/g;

/** Returns the value of a text, or what is wrong with it. */
export function readJson(text) {
  try {
    return { value: JSON.parse(text), problem: null };
  } catch (error) {
    return { value: undefined, problem: error.message };
  }
}

export function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Returns JSON text over indented lines; numbers and names stay as they were written. */
export function indentedJson(text) {
  let [depth, before] = [0, ""];
  const parts = (text.match(PARTS) ?? []).map((part) => {
    if (closes(part)) depth -= 1;
    const shown = gap(before, part, depth) + part;
    if (opens(part)) depth += 1;
    before = part;
    return shown;
  });
  return parts.join("");
}

const opens = (part) => part === "{" || part === "[";
const closes = (part) => part === "}" || part === "]";

function gap(before, part, depth) {
  if (before === ":") return " ";
  const breaks = before === "," || opens(before) !== closes(part);
  return breaks ? `\n${"  ".repeat(Math.min(Math.max(depth, 0), DEEPEST))}` : "";
}
