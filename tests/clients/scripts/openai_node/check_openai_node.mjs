// openai-node and the Vercel AI SDK. Prints what `checks.py` prints: a JSON line for each check.
import assert from 'node:assert/strict'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateObject, generateText, streamText } from 'ai'
import OpenAI from 'openai'
import { z } from 'zod'

const { CLIENTS_URL: url, CLIENTS_MODEL: model } = process.env
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 })
const served = createOpenAICompatible({
  name: 'quire',
  baseURL: `${url}/v1`,
  supportsStructuredOutputs: true,
})(model)
const byResponses = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' })(model)
const messages = [{ role: 'user', content: 'Name three colours.' }]
const prompt = 'Name three colours.'

async function chat() {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 })
  assert.ok(answer.choices[0].message.content)
  assert.equal(answer.usage.completion_tokens, 16)
}

async function chat_stream() {
  const options = { model, messages, max_tokens: 16, temperature: 0 }
  const whole = await client.chat.completions.create(options)
  const stream = await client.chat.completions.create({ ...options, stream: true })
  let text = ''
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? ''
  assert.equal(text, whole.choices[0].message.content)
}

async function completions() {
  const answer = await client.completions.create({ model, prompt: 'One, two,', max_tokens: 8 })
  assert.ok(answer.choices[0].text)
}

async function ai_sdk_text() {
  const { text, usage } = await generateText({ model: served, prompt, maxOutputTokens: 16 })
  assert.ok(text)
  assert.ok(usage.outputTokens >= 1 && usage.outputTokens <= 16)
}

async function ai_sdk_stream() {
  const options = { model: served, prompt, maxOutputTokens: 16, temperature: 0 }
  let text = ''
  for await (const delta of streamText(options).textStream) text += delta
  assert.equal(text, (await generateText(options)).text)
}

async function ai_sdk_object() {
  const schema = z.object({ country: z.enum(['France', 'Japan', 'Peru']), capital: z.boolean() })
  const { object } = await generateObject({ model: served, prompt, schema, maxOutputTokens: 64 })
  assert.ok(schema.safeParse(object).success)
}

async function responses() {
  const options = { model, input: prompt, max_output_tokens: 16, temperature: 0 }
  const whole = await client.responses.create(options)
  let text = ''
  for await (const event of await client.responses.create({ ...options, stream: true })) {
    if (event.type === 'response.output_text.delta') text += event.delta
  }
  assert.ok(text)
  assert.equal(text, whole.output_text)
}

// The default provider speaks the Responses API.
async function ai_sdk_responses() {
  const options = { model: byResponses, prompt, maxOutputTokens: 16, temperature: 0 }
  const whole = await generateText(options)
  assert.ok(whole.text)
  assert.ok(whole.usage.outputTokens >= 1 && whole.usage.outputTokens <= 16)
  let text = ''
  for await (const delta of streamText(options).textStream) text += delta
  assert.equal(text, whole.text)
}

async function ai_sdk_responses_object() {
  const schema = z.object({ country: z.enum(['France', 'Japan', 'Peru']), capital: z.boolean() })
  const { object } = await generateObject({ model: byResponses, prompt, schema, maxOutputTokens: 64 })
  assert.ok(schema.safeParse(object).success)
}

const checks = [
  chat,
  chat_stream,
  completions,
  ai_sdk_text,
  ai_sdk_stream,
  ai_sdk_object,
  responses,
  ai_sdk_responses,
  ai_sdk_responses_object,
]
for (const check of checks) {
  const outcome = { check: check.name, num: 1, of: 1, unit: 'ok', error: '' }
  try {
    await check()
  } catch (error) {
    outcome.num = 0
    outcome.error = `${error.name}: ${error.message}`.slice(0, 500)
  }
  // As Python writes it: with a space after the first colon.
  console.log(JSON.stringify(outcome).replace('{"check":', '{"check": '))
}
