// Vercel's AI SDK, 6 or 7: `node agent.mjs 7 responses stream`. A question, a tool, an answer; then either one more question or an object.

import { AGAIN, answer, forecast, Forecast, Place, QUESTION } from './weather.mjs';

globalThis.AI_SDK_LOG_WARNINGS = false;
const [version, provider, ...words] = process.argv.slice(2);
const { generateObject, generateText, Output, stepCountIs, streamText, tool } = await import(`ai-${version}`);

const models = {
  responses: async () => (await from('openai')).openai('gpt-5'),
  chat: async () => (await from('openai')).openai.chat('gpt-4o'),
  compatible: async () => {
    const { createOpenAICompatible } = await from('openai-compatible');
    const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
    return createOpenAICompatible({ name: 'ours', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true })('our-model');
  },
  anthropic: async () => (await from('anthropic')).anthropic('claude-sonnet-4-5'),
  google: async () => {
    const { createGoogleGenerativeAI } = await from('google');
    return createGoogleGenerativeAI({ baseURL: `${process.env.GOOGLE_GEMINI_BASE_URL}/v1beta` })('gemini-2.5-flash');
  },
};
const model = await models[provider]();
const tools = { forecast: tool({ description: 'Forecast the weather of a city.', inputSchema: Place, execute: forecast }) };
const settings = { model, tools, system: 'You know the weather.', stopWhen: stepCountIs(5), maxRetries: 0 };
const messages = [{ role: 'user', content: QUESTION }];

if (words.includes('output')) {
  answer((await ask({ output: Output.object({ schema: Forecast }) })).output.codes[0]);
} else if (words.includes('object')) {
  await ask({});
  const { object } = await generateObject({ model, system: settings.system, schema: Forecast, messages, maxRetries: 0 });
  answer(object.codes[0]);
} else {
  answer((await ask({})).text);
  messages.push({ role: 'user', content: AGAIN });
  answer((await ask({})).text);
}

function from(name) {
  return import(`@ai-sdk-${version}/${name}`);
}

async function ask(more) {
  if (!words.includes('stream')) {
    const result = await generateText({ ...settings, ...more, messages });
    messages.push(...(result.responseMessages ?? result.response.messages)); // 7 ?? 6
    return { text: result.text, output: more.output && result.output };
  }
  const fail = ({ error }) => {
    throw error;
  };
  const result = streamText({ ...settings, ...more, messages, onError: fail });
  let text = '';
  for await (const part of result.fullStream) {
    if (part.type === 'start-step') text = '';
    if (part.type === 'text-delta') text += part.text;
    if (part.type === 'error') throw part.error;
  }
  messages.push(...((await result.responseMessages) ?? (await result.response).messages));
  return { text, output: more.output && (await result.output) };
}
