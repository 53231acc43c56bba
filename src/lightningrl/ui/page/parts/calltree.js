// Which call continues which, token for token, and where was a conversation begun, forked or rendered again?
import { html } from "../vendor/preact.js";
import { CreditChip } from "./credit.js";
import { counted } from "./digits.js";
import { visible } from "./plain.js";

const OPEN = 12; // longer trees are folded at first

/** [{call, depth}]: each call below the one that it continues; only further branches are moved to the right. */
export function branched(calls) {
  const known = new Set(calls.map((call) => call.number));
  const below = new Map();
  for (const call of calls) {
    const parent = known.has(call.parent) ? call.parent : null;
    below.set(parent, [...(below.get(parent) ?? []), call]);
  }
  const rows = [];
  const add = (call, depth) => {
    rows.push({ call, depth });
    const [first, ...others] = below.get(call.number) ?? [];
    for (const other of others) add(other, depth + 1);
    if (first) add(first, depth);
  };
  for (const root of below.get(null) ?? []) add(root, 0);
  return rows;
}

/** Whether each call simply continues the one before. */
function isChain(calls) {
  return calls.every((call, at) => at === 0 || (call.parent === calls[at - 1].number && call.capture === "bridged"));
}

export function CallTree({ calls, href }) {
  if (calls.length < 2) return null;
  if (isChain(calls)) return html`<p class="soft">Each of the ${calls.length} calls continues the one before, token for token.</p>`;
  return html`<details class="tree" open=${calls.length <= OPEN}><summary>Tree of calls</summary><ol class="call-tree" aria-label="Tree of calls">
    ${branched(calls).map(
      ({ call, depth }) => html`<li key=${call.number} class=${`${call.capture} ${call.parent === null ? "root" : ""}`} style=${{ "--depth": depth }}>
        <a href=${href(call.number)}>call ${call.number}</a>
        <span>${visible(call.agent)}</span>
        <span class="soft">${visible(call.origin)} · ${counted(call.prompt_tokens, "token")} read, ${call.sampled_tokens} sampled</span>
        <${CreditChip} call=${call} />
      </li>`,
    )}
  </ol></details>`;
}
