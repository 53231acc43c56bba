// A shop assistant on Vercel's AI SDK: it answers questions by looking up one record after the other.
//
// It reads a task as JSON from stdin, talks to the server that OPENAI_BASE_URL and OPENAI_API_KEY name, and prints its
// answer. SHOP_MODEL names the model, SHOP_MAX_STEPS limits its calls, SHOP_MAX_TOKENS the length of an answer.

import { text } from 'node:stream/consumers';
import { openai } from '@ai-sdk/openai';
import { generateText, isStepCount, tool } from 'ai';
import { z } from 'zod';

const { SHOP_MODEL = 'assistant', SHOP_MAX_STEPS = '4', SHOP_MAX_TOKENS = '256' } = process.env;
const task = JSON.parse(await text(process.stdin));
const records = new Map(Object.entries(task.records));

const lookUp = tool({
  description: 'read a record',
  inputSchema: z.object({ name: z.string() }),
  execute: async ({ name }) => records.get(name) ?? `no record of ${name}`,
});

const result = await generateText({
  model: openai.chat(SHOP_MODEL),
  instructions: 'look up records, then answer',
  prompt: task.question,
  tools: { look_up: lookUp },
  stopWhen: isStepCount(Number(SHOP_MAX_STEPS)),
  maxOutputTokens: Number(SHOP_MAX_TOKENS),
});
console.log(JSON.stringify({ answer: result.text }));
