// openai for Node.

import OpenAI from 'openai'
import { zodFunction, zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'
import { KEY, MODEL, STORY, TOO_LONG, URL, WEATHER } from './scenarios.mjs'
import { check, checkWeather, errorOf, main } from './scenarios.mjs'

const client = new OpenAI({ baseURL: URL, apiKey: KEY })
const ask = { model: MODEL, messages: [{ role: 'user', content: STORY }] }
const tool = { type: 'function', function: { name: 'get_weather', parameters: WEATHER } }
const named = { type: 'function', function: { name: 'get_weather' } }
const Trip = z.object({ city: z.enum(['Bern', 'Basel']), by_train: z.boolean() })
const tripFormat = zodResponseFormat(Trip, 'trip')

await main({
  async models() {
    const found = []
    for await (const model of client.models.list()) found.push(model.id)
    check(found.includes(MODEL), found)
  },

  async chat() {
    const answer = await client.chat.completions.create(ask)
    check(answer.choices[0].message.content && answer.usage.completion_tokens > 0, answer)
  },

  async 'chat, streamed'() {
    let text = ''
    const stream = await client.chat.completions.create({ ...ask, stream: true })
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? ''
    check(text, text)
  },

  async 'chat, streamed with usage'() {
    const options = { stream: true, stream_options: { include_usage: true } }
    let last
    const stream = await client.chat.completions.create({ ...ask, ...options })
    for await (const chunk of stream) last = chunk
    check(last.usage.completion_tokens > 0 && last.choices.length === 0, last)
  },

  async 'chat, streamed by the helper'() {
    const stream = client.chat.completions.stream(ask)
    let text = ''
    stream.on('content', (delta) => (text += delta))
    const whole = await stream.finalContent()
    check(whole && whole === text, [whole, text])
  },

  async completion() {
    const answer = await client.completions.create({ model: MODEL, prompt: 'Once upon a time' })
    check(answer.choices[0].text, answer)
  },

  async 'tool, named'() {
    const answer = await client.chat.completions.create({
      ...ask,
      tools: [tool],
      tool_choice: named,
    })
    const { tool_calls: calls, content } = answer.choices[0].message
    check(calls.length === 1 && !content, answer)
    checkWeather(calls[0].function.arguments)
  },

  async 'tool, required, and its result'() {
    const more = { tools: [tool], tool_choice: 'required', parallel_tool_calls: false }
    const answer = await client.chat.completions.create({ ...ask, ...more })
    const message = answer.choices[0].message
    check(message.tool_calls.length === 1, answer)
    const result = { role: 'tool', tool_call_id: message.tool_calls[0].id, content: 'sunny' }
    const told = await client.chat.completions.create({
      ...ask,
      messages: [...ask.messages, message, result],
      tools: [tool],
    })
    check(told.choices[0].finish_reason, told)
  },

  async 'tool, streamed'() {
    const stream = client.chat.completions.stream({ ...ask, tools: [tool], tool_choice: named })
    const call = await stream.finalFunctionToolCall()
    checkWeather(call.arguments)
  },

  async 'tool, run by the helper'() {
    let called
    const run = {
      type: 'function',
      function: {
        name: 'get_weather',
        parameters: WEATHER,
        parse: JSON.parse,
        function: (given) => (called = given),
      },
    }
    const asked = { ...ask, tools: [run], tool_choice: named }
    await client.chat.completions.runTools(asked).done()
    checkWeather(called)
  },

  async 'structure, parsed'() {
    const answer = await client.chat.completions.parse({ ...ask, response_format: tripFormat })
    Trip.parse(answer.choices[0].message.parsed)
  },

  async 'structure, parsed from a stream'() {
    const stream = client.chat.completions.stream({ ...ask, response_format: tripFormat })
    const answer = await stream.finalChatCompletion()
    Trip.parse(answer.choices[0].message.parsed)
  },

  async 'structure, parsed arguments of a tool'() {
    const answer = await client.chat.completions.parse({
      ...ask,
      tools: [zodFunction({ name: 'book', parameters: Trip })],
      tool_choice: { type: 'function', function: { name: 'book' } },
    })
    Trip.parse(answer.choices[0].message.tool_calls[0].function.parsed_arguments)
  },

  async 'too long'() {
    const messages = [{ role: 'user', content: TOO_LONG }]
    for (const stream of [false, true]) {
      const error = await errorOf(() =>
        client.chat.completions.create({ model: MODEL, messages, stream }),
      )
      check(error instanceof OpenAI.BadRequestError, error)
      check(error.code === 'context_length_exceeded' && error.param === 'messages', error)
    }
  },

  async 'no such model'() {
    const error = await errorOf(() =>
      client.chat.completions.create({ ...ask, model: 'gpt-5' }),
    )
    check(error instanceof OpenAI.NotFoundError && error.code === 'model_not_found', error)
  },

  async 'left in the middle'() {
    const stream = await client.chat.completions.create({ ...ask, stream: true })
    for await (const _ of stream) break
    const aborted = client.chat.completions.stream(ask)
    aborted.on('content', () => aborted.abort())
    const error = await errorOf(() => aborted.done())
    check(error instanceof OpenAI.APIUserAbortError, error)
  },
})
