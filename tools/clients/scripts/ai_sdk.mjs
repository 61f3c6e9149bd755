// Vercel's AI SDK with its provider for compatible services.

import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import * as ai from 'ai'
import { z } from 'zod'
import { KEY, MODEL, STORY, TOO_LONG, URL, check, checkWeather, errorOf, main } from './scenarios.mjs'

const provider = createOpenAICompatible({ name: 'ssd', baseURL: URL, apiKey: KEY })
const structured = createOpenAICompatible({
  name: 'ssd',
  baseURL: URL,
  apiKey: KEY,
  supportsStructuredOutputs: true, // else a schema is left out, and told by the prompt at best
})
const model = provider(MODEL)
const Trip = z.object({ city: z.enum(['Bern', 'Basel']), by_train: z.boolean() })
const get_weather = ai.tool({
  description: 'The weather.',
  inputSchema: z.object({
    city: z.enum(['Bern', 'Basel', 'Chur']),
    days: z.union([z.literal(1), z.literal(2), z.literal(3)]),
  }),
  execute: async ({ city, days }) => `sunny in ${city} for ${days} days`,
})
const tools = { get_weather }

await main({
  async chat() {
    const { text, usage } = await ai.generateText({ model, system: 'Be brief.', prompt: STORY })
    check(text && usage.outputTokens > 0, usage)
  },

  async 'chat, streamed'() {
    let text = ''
    for await (const delta of ai.streamText({ model, prompt: STORY }).textStream) text += delta
    check(text, text)
  },

  async 'chat, streamed with usage'() {
    const counting = createOpenAICompatible({ name: 'ssd', baseURL: URL, apiKey: KEY, includeUsage: true })
    const told = ai.streamText({ model: counting(MODEL), prompt: STORY })
    await told.consumeStream()
    const usage = await told.usage
    check(usage.outputTokens > 0, usage)
  },

  async completion() {
    const completing = provider.completionModel(MODEL)
    const { text } = await ai.generateText({ model: completing, prompt: 'Once upon a time' })
    check(text, text)
  },

  async 'tool, named'() {
    const toolChoice = { type: 'tool', toolName: 'get_weather' }
    const { toolCalls } = await ai.generateText({ model, prompt: STORY, tools, toolChoice })
    check(toolCalls.length === 1, toolCalls)
    checkWeather(toolCalls[0].input)
  },

  async 'tool, required'() {
    const { toolCalls, toolResults } = await ai.generateText({
      model,
      prompt: STORY,
      tools,
      toolChoice: 'required',
      providerOptions: { ssd: { parallel_tool_calls: false } }, // a story has no end of calls
    })
    check(toolCalls.length >= 1, toolCalls)
    checkWeather(toolCalls[0].input)
    check(toolResults[0].output.startsWith('sunny'), toolResults)
  },

  async 'tool, called, and its result told'() {
    const toolChoice = { type: 'tool', toolName: 'get_weather' }
    const { steps } = await ai.generateText({
      model,
      prompt: STORY,
      tools,
      toolChoice,
      stopWhen: ai.stepCountIs(2),
      prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: 'auto' } : {}),
    })
    check(steps.length === 2 && steps[0].toolResults.length === 1, steps)
  },

  async 'tool, streamed'() {
    const toolChoice = { type: 'tool', toolName: 'get_weather' }
    const told = ai.streamText({ model, prompt: STORY, tools, toolChoice })
    await told.consumeStream()
    const calls = await told.toolCalls
    check(calls.length === 1, calls)
    checkWeather(calls[0].input)
  },

  async 'structure'() {
    const { object } = await ai.generateObject({
      model: structured(MODEL),
      prompt: STORY,
      schema: Trip,
    })
    Trip.parse(object)
  },

  async 'structure, streamed'() {
    const told = ai.streamObject({ model: structured(MODEL), prompt: STORY, schema: Trip })
    for await (const _ of told.partialObjectStream) continue
    Trip.parse(await told.object)
  },

  async 'structure, as an output of text'() {
    const output = ai.Output.object({ schema: Trip })
    const found = await ai.generateText({ model: structured(MODEL), prompt: STORY, output })
    Trip.parse(found.output)
  },

  async 'structure, one of some'() {
    const { object } = await ai.generateObject({
      model: structured(MODEL),
      prompt: STORY,
      output: 'enum',
      enum: ['happy', 'sad'],
    })
    check(['happy', 'sad'].includes(object), object)
  },

  async 'too long'() {
    const error = await errorOf(() => ai.generateText({ model, prompt: TOO_LONG }))
    check(ai.APICallError.isInstance(error) && error.statusCode === 400, error)
    check(!error.isRetryable, error)
    check(error.message.includes('maximum context length'), error.message)
    check(error.data.error.code === 'context_length_exceeded', error.data)
  },

  async 'too long, streamed'() {
    let raised
    const onError = ({ error }) => (raised = error)
    await ai.streamText({ model, prompt: TOO_LONG, onError }).consumeStream()
    check(ai.APICallError.isInstance(raised) && raised.statusCode === 400, raised)
  },

  async 'left in the middle'() {
    const leaving = new AbortController()
    const told = ai.streamText({ model, prompt: STORY, abortSignal: leaving.signal })
    for await (const part of told.fullStream) {
      if (part.type === 'text-delta') leaving.abort()
    }
  },
})
