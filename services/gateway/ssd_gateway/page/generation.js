/** One generation: the request, what has arrived of its answer, and how fast it came. */

import { postStream } from "/page/api.js";
import { addCallPieces } from "/page/tool_calls.js";

const RECENT = 12;
const recent = []; // the newest first; the timeline offers them

export const recentGenerations = () => recent;

export class Generation {
  text = "";
  thoughts = "";
  calls = []; // of tools
  tokens = []; // [text, origin] each
  ids = [];
  finish = null;
  stopReason = null;
  usage = null;
  metrics = null;
  done = false;
  #abort = new AbortController();
  #began = 0;
  #first = 0;
  #last = 0;

  /** ``name`` is what the timeline calls it. */
  constructor(name) {
    this.name = name;
  }

  get stopped() {
    return this.#abort.signal.aborted;
  }

  stop() {
    this.#abort.abort();
  }

  /** Sends the messages to a model and calls ``onChange`` as its answer grows. ``texts`` are more
   * fields, each in JSON already; those that are undefined are left out. */
  async run(model, messages, fields, texts, onChange) {
    const [path, body] = request(model, messages, fields, texts);
    this.#began = performance.now();
    this.startedAt = Date.now();
    try {
      for await (const chunk of postStream(path, body, this.#abort.signal)) {
        this.#take(chunk);
        onChange();
      }
      this.done = true;
    } catch (error) {
      if (!this.stopped) throw error;
    } finally {
      this.#remember();
    }
  }

  #take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    this.metrics = chunk.metrics ?? this.metrics;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const text = choice.delta?.content ?? choice.text ?? "";
    this.text += text;
    this.thoughts += choice.delta?.reasoning_content ?? "";
    addCallPieces(this.calls, choice.delta?.tool_calls ?? []);
    this.ids.push(...(choice.token_ids ?? []));
    this.finish = choice.finish_reason ?? this.finish;
    this.stopReason = choice.stop_reason ?? this.stopReason;
    const origins = choice.token_origins ?? (text ? [{ text, origin: "" }] : []);
    this.tokens.push(...origins.map((token) => [token.text, token.origin]));
    if (origins.length) this.#arrived(origins.length);
  }

  #arrived(count) {
    this.#last = performance.now();
    if (this.#first) return;
    this.#first = this.#last;
    this.atFirst = count;
  }

  #remember() {
    if (!this.metrics?.ssd?.target) return;
    recent.unshift(this);
    recent.length = Math.min(recent.length, RECENT);
  }

  /** Returns the server's measures; as long as there are none, those of this browser. */
  statistics() {
    const { metrics, usage } = this;
    return {
      tokens: usage?.completion_tokens ?? this.tokens.length,
      rate: metrics?.tokens_per_second ?? this.#rate(),
      first: metrics?.time_to_first_token_ms ?? (this.#first ? this.#first - this.#began : null),
      cached: metrics?.ssd?.cache_tokens ?? this.tokens.filter((token) => token[1] === "cache").length,
      prefix: usage?.prompt_tokens_details?.cached_tokens ?? null,
      ...pick(metrics?.ssd ?? {}, ["hits", "late", "misses", "rounds", "mode", "seed", "moved"]),
      finish: this.stopped ? "stopped" : this.finish,
      stopReason: this.stopReason,
    };
  }

  #rate() {
    const seconds = (this.#last - this.#first) / 1000;
    return seconds > 0 ? (this.tokens.length - this.atFirst) / seconds : null;
  }
}

/** Models without a chat template continue the last message as plain text. Texts go out as they were
 * written: numbers of this language would lose digits, and its objects the order of their names. */
function request(model, messages, fields, texts) {
  const chat = model?.has_chat_template !== false;
  const body = JSON.stringify({
    ...(model ? { model: model.id } : {}),
    ...(chat ? { messages } : { prompt: messages.at(-1).content }),
    ...fields,
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    return_token_origins: true,
  });
  const path = chat ? "/v1/chat/completions" : "/v1/completions";
  const given = Object.entries(texts).filter(([, text]) => text !== undefined);
  return [path, `${body.slice(0, -1)}${given.map(([name, text]) => `,"${name}":${text}`).join("")}}`];
}

function pick(source, names) {
  return Object.fromEntries(names.map((name) => [name, source[name] ?? null]));
}
