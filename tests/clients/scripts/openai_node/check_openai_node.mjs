// openai-node and the Vercel AI SDK. Prints what `checks.py` prints: a JSON line for each check.
import assert from 'node:assert/strict'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, Output, stepCountIs, streamText, tool } from 'ai'
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
const tools = new OpenAI({ baseURL: `${url}/tools/v1`, apiKey: 'none', maxRetries: 0 })
const withTools = createOpenAICompatible({ name: 'quire', baseURL: `${url}/tools/v1` })('tools')
const toolsByResponses = createOpenAI({ baseURL: `${url}/tools/v1`, apiKey: 'none' })('tools')
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
  const output = Output.object({ schema })
  const answer = await generateText({ model: served, prompt, output, maxOutputTokens: 64 })
  assert.ok(schema.safeParse(answer.output).success)
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
  const output = Output.object({ schema })
  const answer = await generateText({ model: byResponses, prompt, output, maxOutputTokens: 64 })
  assert.ok(schema.safeParse(answer.output).success)
}

const parameters = {
  type: 'object',
  properties: { country: { enum: ['France', 'Japan', 'Peru'] } },
  required: ['country'],
  additionalProperties: false,
}
const required = { tool_choice: 'required', parallel_tool_calls: false }

// A call whole and streamed, its result, and the answer to it.
async function chat_tools() {
  const city = { type: 'function', function: { name: 'city', parameters } }
  const options = { model: 'tools', tools: [city], max_tokens: 100, temperature: 0 }
  const asked = { ...options, ...required, messages }
  const { message } = (await tools.chat.completions.create(asked)).choices[0]
  const [call] = message.tool_calls
  assert.ok(parameters.properties.country.enum.includes(JSON.parse(call.function.arguments).country))
  const streamed = await tools.chat.completions.stream(asked).finalChatCompletion()
  assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments)
  const result = { role: 'tool', tool_call_id: call.id, content: 'It is far.' }
  const turns = [...messages, message, result]
  const answer = await tools.chat.completions.create({ ...options, messages: turns, tool_choice: 'none' })
  assert.ok(answer.choices[0].message.content)
}

async function responses_tools() {
  const city = { type: 'function', name: 'city', parameters, strict: true }
  const asked = { model: 'tools', tools: [city], input: prompt, max_output_tokens: 100, temperature: 0, ...required }
  const whole = await tools.responses.create(asked)
  const call = whole.output.find((item) => item.type === 'function_call')
  const streamed = await tools.responses.stream(asked).finalResponse()
  assert.equal(streamed.output.find((item) => item.type === 'function_call').arguments, call.arguments)
}

// One step calls the function, which the SDK runs; the next step answers.
async function checkTool(model) {
  const ran = []
  const inputSchema = z.object({ country: z.enum(['France', 'Japan', 'Peru']) })
  const execute = async ({ country }) => {
    ran.push(country)
    return 'It is far.'
  }
  const city = tool({ description: 'A city.', inputSchema, execute })
  const first = { toolChoice: { type: 'tool', toolName: 'city' } }
  const prepareStep = ({ stepNumber }) => (stepNumber === 0 ? first : { toolChoice: 'none' })
  const options = { model, prompt, tools: { city }, prepareStep, stopWhen: stepCountIs(2), maxOutputTokens: 100 }
  const { steps, text } = await generateText(options)
  assert.equal(steps.length, 2)
  assert.equal(ran.length, 1)
  assert.ok(text)
}

async function ai_sdk_tool() {
  await checkTool(withTools)
}

async function ai_sdk_responses_tool() {
  await checkTool(toolsByResponses)
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
  chat_tools,
  responses_tools,
  ai_sdk_tool,
  ai_sdk_responses_tool,
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
