/** Markdown of a model's answer as DOM nodes; no HTML of the model is ever parsed. */

import { CodeBlock } from "/page/code.js";
import { make } from "/page/dom.js";
import { printable } from "/page/printable.js";

const DEEPEST = 6; // quotes in lists in quotes
const LONGEST = 20000; // characters of a paragraph whose emphasis and links are looked for
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}|$)/;
const TABLE = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

/** The rendered view of a text that grows: blocks that did not change are left as they are. */
export class MarkdownView {
  #sources = [];

  constructor(node) {
    this.node = node;
  }

  update(text) {
    const blocks = splitBlocks(printable(text).split("\n"));
    const sources = blocks.map((block) => `${block.kind}\n${block.lines.join("\n")}`);
    const same = sources.findIndex((source, i) => source !== this.#sources[i]);
    const kept = same < 0 ? sources.length : same;
    while (this.node.childNodes.length > kept) this.node.lastChild.remove();
    this.node.append(...blocks.slice(kept).map((block) => render(block, 0)));
    this.#sources = sources;
  }
}

function kindOf(lines, i) {
  const line = lines[i];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (isTable(lines, i)) return "table";
  return line.trim() ? "paragraph" : "blank";
}

function isTable(lines, i) {
  const [head, rule] = [lines[i], lines[i + 1] ?? ""];
  return head.includes("|") && rule.includes("|") && rule.length < 1000 && TABLE.test(rule);
}

const ENDS = {
  code: endOfCode,
  heading: (lines, i) => i + 1,
  rule: (lines, i) => i + 1,
  blank: (lines, i) => i + 1,
  quote: (lines, i) => endWhere(lines, i, (kind) => kind !== "quote"),
  table: (lines, i) => endWhere(lines, i, (kind, line) => !line.includes("|")),
  paragraph: (lines, i) => endWhere(lines, i, (kind) => kind !== "paragraph"),
  list: endOfList,
};

function splitBlocks(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    const kind = kindOf(lines, i);
    const end = ENDS[kind](lines, i);
    if (kind !== "blank") blocks.push({ kind, lines: lines.slice(i, end) });
    i = end;
  }
  return blocks;
}

function endWhere(lines, start, ends) {
  let i = start + 1;
  while (i < lines.length && !ends(kindOf(lines, i), lines[i])) i += 1;
  return i;
}

/** Code that is still being written ends with the text. */
function endOfCode(lines, start) {
  const fence = FENCE.exec(lines[start])[1];
  const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  let i = start + 1;
  while (i < lines.length && !closes(lines[i])) i += 1;
  return Math.min(i + 1, lines.length);
}

/** A list goes on through blank lines as long as items or indented lines follow. */
function endOfList(lines, start) {
  let end = start + 1;
  for (let i = end; i < lines.length; i += 1) {
    const kind = kindOf(lines, i);
    const indented = /^(?: {2}|\t)/.test(lines[i]);
    if (kind === "blank") continue;
    const ofThisList = kind === "list" && isNumbered(lines[i]) === isNumbered(lines[start]);
    const goesOn = ofThisList || indented || (kind === "paragraph" && i === end);
    if (!goesOn) break;
    end = i + 1;
  }
  return end;
}

function isNumbered(line) {
  return /\d/.test(ITEM.exec(line)[2]);
}

const RENDERED = {
  code: renderCode,
  heading: renderHeading,
  rule: () => make("hr"),
  quote: (lines, depth) => make("blockquote", {}, ...nested(lines.map((l) => l.replace(QUOTE, "")), depth)),
  table: renderTable,
  paragraph: (lines) => make("p", {}, ...inline(lines.join("\n"))),
  list: renderList,
};

function render(block, depth) {
  return RENDERED[block.kind](block.lines, depth);
}

function nested(lines, depth) {
  if (depth >= DEEPEST) return [make("p", {}, lines.join("\n"))];
  return splitBlocks(lines).map((block) => render(block, depth + 1));
}

function renderCode(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
  return new CodeBlock(language || "code", lines.slice(1, closed ? -1 : undefined).join("\n")).node;
}

/** The page's own headings are of the first two levels. */
function renderHeading([line]) {
  const [, signs, text] = HEADING.exec(line);
  const level = Math.min(signs.length + 2, 6);
  return make(`h${level}`, {}, ...inline(text.trimEnd().replace(/ #+$/, "")));
}

function renderTable([head, , ...rows]) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
  const row = (tag, line) => make("tr", {}, ...cells(line).map((cell) => make(tag, {}, ...inline(cell.trim()))));
  const body = make("tbody", {}, ...rows.map((line) => row("td", line)));
  const table = make("table", {}, make("thead", {}, row("th", head)), body);
  return make("div", { class: "scrolled", tabindex: "0" }, table);
}

function renderList(lines, depth) {
  const items = splitItems(lines).map((item) => make("li", {}, ...renderItem(item, depth)));
  if (!isNumbered(lines[0])) return make("ul", {}, ...items);
  return make("ol", { start: Number.parseInt(lines[0], 10) }, ...items);
}

function splitItems(lines) {
  const outer = ITEM.exec(lines[0])[1].length;
  const items = [];
  let width = 0;
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length < outer + 2 && !(items.length && found[1].length >= width)) {
      width = found[0].length;
      items.push([line.slice(width)]);
    } else {
      items.at(-1).push(withoutIndent(line, width));
    }
  }
  return items;
}

function withoutIndent(line, width) {
  const indent = line.length - line.trimStart().length;
  return line.slice(Math.min(indent, width));
}

/** The text of an item that begins with a paragraph stands beside its mark. */
function renderItem(lines, depth) {
  if (depth >= DEEPEST) return [lines.join("\n")];
  const [first, ...rest] = splitBlocks(lines);
  if (first?.kind !== "paragraph") return nested(lines, depth);
  return [...inline(first.lines.join("\n")), ...rest.map((block) => render(block, depth + 1))];
}

// What is inside a paragraph. Each pattern looks a bounded way ahead, so no text is slow to read.
const wrapped = (tag) => (found, depth) => make(tag, {}, ...inline(found[1], depth + 1));
const INLINE = [
  [/\\([!-/:-@[-`{-~])/y, (found) => found[1]],
  [/(`+)(?!`)([^]{1,1000}?)(?<!`)\1(?!`)/y, (found) => make("code", {}, found[2].trim() || found[2])],
  [/\*\*(?=\S)([^]{1,2000}?)(?<=\S)\*\*(?!\*)/y, wrapped("strong")],
  [/(?<!\w)__(?=\S)([^]{1,2000}?)(?<=\S)__(?!\w)/y, wrapped("strong")],
  [/\*(?=[^\s*])([^]{1,2000}?)(?<=[^\s*])\*(?!\*)/y, wrapped("em")],
  [/(?<!\w)_(?=[^\s_])([^]{1,2000}?)(?<=[^\s_])_(?!\w)/y, wrapped("em")],
  [/~~(?=\S)([^]{1,2000}?)(?<=\S)~~/y, wrapped("del")],
  [/!?\[([^[\]]{0,1000})\]\( *<?([^\s<>()]{1,2000}(?:\([^\s()]{0,500}\)[^\s<>()]{0,500})?)>?(?: +"[^"]{0,500}")? *\)/y, link],
  [/<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y, (found) => anchor(found[1], [found[1]])],
  [/(?<!\w)https?:\/\/[^\s<>"'`]{0,2000}[^\s<>"'`.,;:!?)\]*_]/y, (found) => anchor(found[0], [found[0]])],
];
const SPECIAL = /[\\`*_~![<h]/g;

function inline(text, depth = 0) {
  if (depth > DEEPEST || text.length > LONGEST) return [text];
  const nodes = [];
  let plain = 0;
  for (let at = nextSpecial(text, 0); at < text.length; at = nextSpecial(text, at)) {
    const [node, end] = special(text, at, depth);
    if (node !== null) {
      nodes.push(...withBreaks(text.slice(plain, at)), node);
      plain = end;
    }
    at = end;
  }
  return [...nodes, ...withBreaks(text.slice(plain))];
}

function nextSpecial(text, from) {
  SPECIAL.lastIndex = from;
  return SPECIAL.exec(text)?.index ?? text.length;
}

function special(text, at, depth) {
  for (const [pattern, build] of INLINE) {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found) return [build(found, depth), at + found[0].length];
  }
  return [null, at + 1];
}

function withBreaks(text) {
  return text.split("\n").flatMap((line, i) => (i ? [make("br"), line] : [line])).filter(Boolean);
}

function link(found, depth) {
  return anchor(found[2], inline(found[1] || found[2], depth + 1)) ?? found[0];
}

/** A link that could do anything but open a page or a mail is shown as the text that it is. */
function anchor(address, content) {
  const url = parsed(address);
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return null;
  const attributes = { href: url.href, rel: "noopener noreferrer", target: "_blank", title: url.href };
  return make("a", attributes, ...content);
}

function parsed(address) {
  try {
    return new URL(address);
  } catch {
    return null;
  }
}
