/** Settings of requests: a form whose fields are kept in the browser; what is empty is not sent. */

import { byId, make, say } from "/page/dom.js";
import { isObject, readJson } from "/page/json.js";

const NUMBERS = {
  temperature: "Temperature",
  top_p: "Top-p",
  min_p: "Min-p",
  repetition_penalty: "Repetition penalty",
  presence_penalty: "Presence penalty",
  frequency_penalty: "Frequency penalty",
};
const WHOLE = { top_k: "Top-k", max_tokens: "Tokens at most" };
const JSON_FIELDS = {
  schema: { label: "JSON schema", fits: isObject, kind: "an object" },
  tools: { label: "Tools", fits: Array.isArray, kind: "a list" },
};
const KEPT = "ssd.settings";
const form = byId("settings-form");
let models = [];

export const apiKey = () => form.elements.key.value.trim();

/** Returns the entry of the chosen model; undefined while none is known. */
export function chosenModel() {
  return models.find((model) => model.id === form.elements.model.value);
}

/** Returns the sampling fields of a request; a field that is no number is an error with its name. */
export function samplingFields() {
  const fields = {};
  for (const [name, label] of Object.entries(NUMBERS)) put(fields, name, asNumber(value(name), label));
  for (const [name, label] of Object.entries(WHOLE)) put(fields, name, asWhole(value(name), label));
  const stop = form.elements.stop.value.split("\n").filter(Boolean).map(unescaped);
  if (stop.length) fields.stop = stop;
  return fields;
}

/** Returns the seed's digits, or nothing. */
export function seedDigits() {
  return asDigits(value("seed"), "Seed");
}

export function speculationFields() {
  const mode = value("speculation");
  return mode ? { speculation: { mode } } : {};
}

export const hasSchema = () => value("schema") !== "";

/** Returns what the answer may be, as texts in JSON: the schema that it is held to, and tools. */
export function structureTexts() {
  const [schema, tools] = [jsonText("schema"), jsonText("tools")];
  const named = schema && `{"name":"answer","schema":${schema},"strict":true}`;
  return { response_format: named && `{"type":"json_schema","json_schema":${named}}`, tools };
}

/** Returns the text of a field as it was written; text that is not what it must be is an error. */
function jsonText(name) {
  const text = value(name);
  const { label, fits, kind } = JSON_FIELDS[name];
  if (text === "") return undefined;
  const { value: found, problem } = readJson(text);
  if (problem) throw new Error(`${label}: this is not JSON (${problem}).`);
  if (!fits(found)) throw new Error(`${label}: this must be ${kind} in JSON.`);
  return text;
}

export function asWhole(text, label) {
  const digits = asDigits(text, label);
  return digits === undefined ? undefined : Number(digits);
}

export function asDigits(text, label) {
  if (text === "") return undefined;
  if (!/^-?\d{1,20}$/.test(text)) throw new Error(`${label}: “${text}” is not a whole number.`);
  return text;
}

function asNumber(text, label) {
  if (text === "") return undefined;
  const number = Number(text.replace(",", "."));
  if (!Number.isFinite(number)) throw new Error(`${label}: “${text}” is not a number.`);
  return number;
}

function put(fields, name, given) {
  if (given !== undefined) fields[name] = given;
}

function value(name) {
  return form.elements[name].value.trim();
}

function unescaped(text) {
  const signs = { n: "\n", t: "\t", "\\": "\\" };
  return text.replace(/\\([nt\\])/g, (_, sign) => signs[sign]);
}

/** Offers the models that are served; the chosen one stays chosen if it is among them. */
export function offerModels(served) {
  models = served;
  const select = form.elements.model;
  const chosen = select.value || kept().model;
  select.replaceChildren(...models.map((model) => make("option", { value: model.id }, model.id)));
  if (models.some((model) => model.id === chosen)) select.value = chosen;
}

function kept() {
  return JSON.parse(localStorage.getItem(KEPT) ?? "{}");
}

function keep() {
  localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(new FormData(form))));
}

function check() {
  say(byId("settings-problem"), problemOf(() => samplingFields() && seedDigits()));
  for (const name of Object.keys(JSON_FIELDS)) {
    const problem = problemOf(() => jsonText(name));
    say(byId(`${name}-problem`), problem);
    form.elements[name].setAttribute("aria-invalid", String(problem !== ""));
  }
}

function problemOf(read) {
  try {
    read();
    return "";
  } catch (error) {
    return error.message;
  }
}

/** Prepares the dialog; ``onChange`` is called after each change, ``onKey`` after one of the key. */
export function startSettings(onChange, onKey) {
  const dialog = byId("settings");
  for (const [name, text] of Object.entries(kept())) {
    if (form.elements[name] && name !== "model") form.elements[name].value = text;
  }
  check();
  byId("open-settings").addEventListener("click", () => dialog.showModal());
  form.addEventListener("input", () => {
    keep();
    check();
    onChange();
  });
  form.elements.key.addEventListener("change", onKey);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close();
  });
}
