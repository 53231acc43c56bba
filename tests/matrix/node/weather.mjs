// The tool that the agents of the matrix share, for Node. It leaves a trace on stdout, and only it knows the code.

import { writeSync } from 'node:fs';
import { z } from 'zod';

export const QUESTION = 'What will the weather be like?';
export const AGAIN = 'Say that again, please.';

export const Place = z.object({
  city: z.string().describe('Where.'),
  days: z.number().int().describe('How far ahead.'),
  metric: z.boolean().describe('Whether in degrees Celsius.'),
  note: z.string().nullable().describe('Anything else that matters.'),
});

export const Forecast = z.object({ codes: z.array(z.string()), sure: z.boolean(), doubt: z.string().nullable() });

export async function forecast({ city, days, metric, note }) {
  line('TOOL', [city, days, metric, note]);
  return `${city}: ${process.env.MATRIX_CODE}/${days}`;
}

// What the agent has to say, on a line of its own.
export function answer(text) {
  line('ANSWER', text);
}

// In one piece: tools may run at the same time.
function line(word, what) {
  writeSync(1, `\n${word} ${JSON.stringify(what)}\n`);
}
