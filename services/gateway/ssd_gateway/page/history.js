/** Conversations, kept in this browser: one entry of its storage each, the oldest given up first. */

const PREFIX = "ssd.conversation.";
const MOST = 50;

export function newConversation() {
  const random = crypto.getRandomValues(new Uint32Array(2)).join("");
  return { id: `${Date.now()}-${random}`, title: "", system: "", messages: [], changed: Date.now() };
}

/** Returns the conversations, the last changed first. */
export function storedConversations() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const found = keys.map((key) => JSON.parse(localStorage.getItem(key)));
  return found.sort((a, b) => b.changed - a.changed);
}

/** Stores a conversation; others make room for it, never the reverse. */
export function store(conversation) {
  conversation.changed = Date.now();
  const others = storedConversations().filter((other) => other.id !== conversation.id);
  while (others.length >= MOST) forget(others.pop());
  while (!written(conversation)) {
    if (!others.length) throw new Error("This conversation is too long for the browser's storage.");
    forget(others.pop());
  }
}

function written(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    return false;
  }
}

export function forget(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
}

/** A conversation is named by its first message until it has a name of its own. */
export function titleOf(conversation) {
  const first = conversation.messages[0]?.content.replace(/\s+/g, " ").trim() ?? "";
  const short = first.length > 60 ? `${first.slice(0, 60)}…` : first;
  return conversation.title || short || "New conversation";
}
