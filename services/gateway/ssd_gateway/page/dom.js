/** Nodes of the page: built one by one, so that text is never read as HTML. */

export const byId = (id) => document.getElementById(id);

/** Makes an element; an attribute that is a function listens to that event, false leaves it out. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** Shows a text in an element that is hidden while there is none. */
export function say(node, text) {
  node.textContent = text;
  node.hidden = !text;
}

/** Tells users of screen readers what they cannot see happen. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Returns a number with its noun. */
export function counted(n, one, many) {
  return `${n} ${n === 1 ? one : many}`;
}

/** Calls a function at the next frame, however often it was asked to until then. */
export function oncePerFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

/** Copies text; browsers offer their clipboard to pages of https and of this host only. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { class: "unseen", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Makes a button that copies a text and says so for a moment. */
export function copyButton(text) {
  const button = make("button", { type: "button", class: "quiet", click: press }, "Copy");
  async function press() {
    try {
      await copy(text());
      button.textContent = "Copied";
    } catch (error) {
      button.textContent = "Not copied";
      button.title = String(error);
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
  return button;
}
