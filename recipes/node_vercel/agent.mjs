// An assistant of a shop that answers questions: it looks up one record after the other, and says what it has read.
//
// An ordinary program on Vercel's AI SDK. It reads a task as JSON from stdin, talks to whatever OPENAI_BASE_URL and OPENAI_API_KEY point at, and
// prints its answer. SHOP_MODEL names the model, SHOP_MAX_STEPS limits how often it is called, SHOP_MAX_TOKENS what it says each time.

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
