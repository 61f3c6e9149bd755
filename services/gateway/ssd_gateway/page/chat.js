/** The chat: conversations, their messages, and the answer that is being written. */

import { announce, byId, counted, make, oncePerFrame, say } from "/page/dom.js";
import { Generation } from "/page/generation.js";
import { forget, newConversation, store, storedConversations, titleOf } from "/page/history.js";
import { AnswerView, questionNode, sends } from "/page/message.js";
import { fillLegend } from "/page/origins.js";
import { chosenModel, hasSchema, samplingFields, seedDigits, speculationFields, structureTexts } from "/page/settings.js";
import { answerToSend } from "/page/tool_calls.js";

const SHOWN = "ssd.shown";

export class Chat {
  #views = new Map(); // the view of each answer that is on the page
  #running = null; // {generation, message, conversation}
  #draw = oncePerFrame(() => this.#drawView(this.#running?.message));

  constructor() {
    this.log = byId("messages");
    this.prompt = byId("prompt");
    this.shown = localStorage.getItem(SHOWN) ?? "rendered";
    fillLegend(byId("legend"));
    this.#listen();
    this.#listenToConversations();
    this.#chooseShown(this.shown);
    this.open(storedConversations()[0] ?? newConversation());
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#sendPrompt();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (!sends(event)) return;
      event.preventDefault();
      this.#sendPrompt();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.defaultPrevented) this.stop();
    });
    for (const radio of document.querySelectorAll("input[name=shown]")) {
      radio.addEventListener("change", () => this.#chooseShown(radio.value));
    }
    addEventListener("pagehide", () => this.#running && this.#store(this.#running.conversation));
  }

  #listenToConversations() {
    byId("new-conversation").addEventListener("click", () => {
      this.open(newConversation());
      this.prompt.focus();
    });
    byId("delete-conversation").addEventListener("click", () => this.#delete());
    byId("rename-conversation").addEventListener("click", () => this.#beginRename());
    byId("rename-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#rename(byId("rename").value.trim());
    });
    byId("rename-form").addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      this.#rename(this.conversation.title);
    });
    byId("system").addEventListener("input", () => {
      this.conversation.system = byId("system").value;
      this.#store(this.conversation);
      this.#describe();
    });
    byId("toggle-sidebar").addEventListener("click", () => this.#showSidebar());
  }

  /** Says what the chosen model cannot do. */
  modelChanged() {
    const plain = chosenModel()?.has_chat_template === false;
    const text = "This model has no chat template: it continues your last message as plain text, and sees nothing else of the conversation.";
    say(byId("notice"), plain ? text : "");
    byId("system").disabled = plain;
  }

  /** Shows a conversation from its first message. */
  open(conversation) {
    this.conversation = conversation;
    this.#views.clear();
    this.#showFrom(0);
    if (!conversation.messages.length) this.log.append(greeting());
    byId("system").value = conversation.system;
    this.#showSidebar(false);
    this.#describe();
  }

  /** Shows the messages from one on; those before it stay, and nobody hears them read again. */
  #showFrom(index) {
    const { messages } = this.conversation;
    while (this.log.childNodes.length > index) this.log.lastChild.remove();
    this.log.append(...messages.slice(index).map((message, i) => this.#node(message, index + i)));
    this.log.scrollTop = this.log.scrollHeight;
  }

  #node(message, index) {
    if (message.role === "user") {
      return questionNode(message, (text) => this.#continueFrom(index, text));
    }
    const view = new AnswerView(message, () => this.#regenerate(index), () => this.#sendResults(index));
    this.#views.set(message, view);
    view.update(this.shown, this.#running?.message === message);
    return view.node;
  }

  #sendPrompt() {
    const text = this.prompt.value;
    if (!text.trim() || this.#running) return;
    this.prompt.value = "";
    this.#views.get(this.conversation.messages.at(-1))?.calls.keepResults();
    this.#continueFrom(this.conversation.messages.length, text);
  }

  /** Puts a question where one was, or at the end; what came after it is gone. */
  #continueFrom(index, text) {
    this.stop();
    this.conversation.messages.splice(index, Infinity, { role: "user", content: text });
    this.#answer(index);
  }

  /** Goes on after the calls of an answer; what came after them is gone. */
  #sendResults(index) {
    this.#views.get(this.conversation.messages[index]).calls.keepResults();
    this.#regenerate(index + 1);
  }

  #regenerate(index) {
    this.stop();
    this.conversation.messages.splice(index);
    this.#answer(index);
  }

  stop() {
    this.#running?.generation.stop();
    this.#setRunning(null);
  }

  /** Answers the last question; messages from ``index`` on are not on the page yet. */
  async #answer(index) {
    const { conversation } = this;
    const asked = toSend(conversation);
    const message = newAnswer();
    conversation.messages.push(message);
    const running = { generation: new Generation(`Chat: ${titleOf(conversation)}`), message, conversation };
    this.#setRunning(running);
    this.#store(conversation);
    this.#showFrom(index);
    this.#describe();
    announce("Answering");
    try {
      const fields = { ...samplingFields(), ...speculationFields() };
      const texts = { ...structureTexts(), seed: seedDigits() };
      await running.generation.run(chosenModel(), asked, fields, texts, () => this.#grow(running));
    } catch (error) {
      message.error = error.message;
    }
    this.#end(running);
  }

  #grow({ generation, message }) {
    message.content = generation.text;
    message.thoughts = generation.thoughts;
    message.calls = generation.calls;
    message.tokens = generation.tokens;
    message.statistics = generation.statistics();
    this.#draw();
  }

  #end(running) {
    const { generation, message, conversation } = running;
    message.statistics = generation.statistics();
    if (this.#running === running) this.#setRunning(null);
    this.#drawView(message);
    if (conversation.messages.includes(message)) this.#store(conversation);
    this.#describe();
    announce(message.error ?? `Answer ${generation.stopped ? "stopped" : "finished"}: ${counted(message.tokens.length, "token", "tokens")}`);
  }

  #drawView(message) {
    const view = this.#views.get(message);
    if (!view) return;
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    view.update(this.shown, this.#running?.message === message);
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  #setRunning(running) {
    this.#running = running;
    byId("stop").hidden = !running;
    byId("send").disabled = Boolean(running);
  }

  #store(conversation) {
    try {
      store(conversation);
    } catch (error) {
      say(byId("notice"), error.message);
    }
  }

  #chooseShown(shown) {
    this.shown = shown;
    localStorage.setItem(SHOWN, shown);
    document.querySelector(`input[name=shown][value=${shown}]`).checked = true;
    byId("legend").hidden = shown !== "origins";
    for (const message of this.#views.keys()) this.#drawView(message);
  }

  /** Brings title, list and system prompt up to date. */
  #describe() {
    byId("conversation-title").textContent = titleOf(this.conversation);
    byId("system-state").textContent = this.conversation.system.trim() ? " (set)" : "";
    const listed = storedConversations().map((conversation) => this.#listed(conversation));
    byId("conversations").replaceChildren(...listed);
  }

  #listed(stored) {
    const current = stored.id === this.conversation.id;
    const open = () => this.open(stored.id === this.#running?.conversation.id ? this.#running.conversation : stored);
    const attributes = { class: "quiet wide", "aria-current": current && "true", click: open };
    return make("li", {}, make("button", attributes, titleOf(stored)));
  }

  #showSidebar(open = !byId("sidebar").classList.contains("open")) {
    byId("sidebar").classList.toggle("open", open);
    byId("toggle-sidebar").setAttribute("aria-expanded", String(open));
  }

  #beginRename() {
    byId("rename-form").hidden = false;
    byId("conversation-title").hidden = true;
    byId("rename").value = titleOf(this.conversation);
    byId("rename").select();
  }

  #rename(title) {
    const changed = title !== this.conversation.title;
    this.conversation.title = title;
    byId("rename-form").hidden = true;
    byId("conversation-title").hidden = false;
    if (changed) this.#store(this.conversation);
    this.#describe();
    byId("rename-conversation").focus();
  }

  /** Deletes the conversation; it can be had back as long as the note about it stands. */
  #delete() {
    const gone = this.conversation;
    if (this.#running?.conversation === gone) this.stop();
    forget(gone);
    this.open(storedConversations()[0] ?? newConversation());
    const undo = make("button", { type: "button", class: "quiet", click: () => this.#restore(gone) }, "Undo");
    say(byId("notice"), `“${titleOf(gone)}” was deleted. `);
    byId("notice").append(undo);
    this.prompt.focus();
  }

  #restore(conversation) {
    this.#store(conversation);
    this.open(conversation);
    this.modelChanged();
    this.prompt.focus();
  }
}

/** Makes an answer that has nothing yet; ``json`` says that it is held to a schema. */
function newAnswer() {
  const parts = { content: "", thoughts: "", calls: [], tokens: [] };
  return { role: "assistant", ...parts, statistics: {}, error: null, json: hasSchema() };
}

/** Returns the messages as the API takes them; answers that never began are left out. */
function toSend({ system, messages }) {
  const said = messages.flatMap((message) =>
    message.role === "user" ? [{ role: "user", content: message.content }] : answerToSend(message),
  );
  return system.trim() ? [{ role: "system", content: system }, ...said] : said;
}

function greeting() {
  const text = "Ask something. Below each answer stands how fast it came and where its tokens are from.";
  return make("p", { class: "greeting" }, text);
}
