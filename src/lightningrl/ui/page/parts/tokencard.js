// What is known of one token? Its text and id; of a sampled one, its probability, what else was possible, what it taught.
import { html } from "../vendor/preact.js";
import { percent, signed } from "./digits.js";
import { figure } from "./figures.js";
import { ORIGINS, kindOf, textOf } from "./sequence.js";

/** `place`: the index of the token, sampled ones after the prompt's; null: none is chosen. */
export function TokenCard({ call, place, pinned }) {
  const { prompt, sampled } = call.tokens;
  if (place === null) {
    return html`<div class="token-card idle soft">Point at a token, or press <kbd>→</kbd> and <kbd>←</kbd>. A click keeps it.</div>`;
  }
  const at = place - prompt.ids.length;
  const text = at < 0 ? textOf(prompt, place) : textOf(sampled, at);
  return html`<div class="token-card" role="status">
    <div class="row apart">
      <code class="token-text">${quoted(text)}</code>
      <span class="soft">${at < 0 ? `prompt token ${place + 1}` : `sampled token ${at + 1} of ${sampled.ids.length}`} · id ${at < 0 ? prompt.ids[place] : sampled.ids[at]}${pinned ? " · kept: click it again to let it go" : ""}</span>
    </div>
    ${at < 0 ? html`<${Read} call=${call} place=${place} />` : html`<${Facts} sampled=${sampled} at=${at} />`}
  </div>`;
}

function Read({ call, place }) {
  const run = call.tokens.prompt.runs.find((each) => each.from <= place && place < each.to);
  if (run === undefined) return null;
  const kind = kindOf(run, call.number);
  const words = { earlier: `rendered for call ${run.call}`, sampled: `sampled in call ${run.call}` }[kind] ?? ORIGINS[kind];
  return html`<p>The engine read it: ${words}.</p>`;
}

function Facts({ sampled, at }) {
  const probability = Math.exp(Math.min(0, sampled.logprobs[at]));
  const [advantage, ratio, entropy, weight] = ["advantages", "ratios", "entropies", "weights"].map((name) => sampled[name]?.[at]);
  const facts = [["probability", percent(probability), `log-probability ${figure(sampled.logprobs[at], 4)}`]];
  if (known(ratio)) facts.push(["after the step", percent(Math.min(1, probability * ratio)), `ratio × ${figure(ratio, 4)}`]);
  if (known(advantage)) facts.push(["advantage", signed(advantage), pushed(advantage)]);
  if (known(entropy)) facts.push(["entropy", `${figure(entropy)} nats`, "of all tokens that were possible here"]);
  if (known(weight)) facts.push(["weight", figure(weight), "of this token in the step's loss"]);
  return html`<dl class="facts">
      ${facts.map(([name, value, more]) => html`<div key=${name}><dt>${name}</dt><dd><strong>${value}</strong> <span class="soft">${more}</span></dd></div>`)}
    </dl>
    <${Alternatives} all=${sampled.alternatives?.[at]} logprob=${sampled.logprobs[at]} />`;
}

function known(value) {
  return value !== null && value !== undefined && !Number.isNaN(value);
}

function pushed(advantage) {
  if (advantage === 0) return "not pushed";
  return advantage > 0 ? "pushed up by this rollout" : "pushed down by this rollout";
}

/** The likeliest tokens at this place, as bars. */
function Alternatives({ all, logprob }) {
  if (!all?.length) return null;
  const ranked = [...all].sort((one, other) => other.logprob - one.logprob);
  const rank = ranked.findIndex((each) => Math.abs(each.logprob - logprob) < 1e-4);
  return html`<table class="alternatives" aria-label="Likeliest tokens here">
    <tbody>
      ${ranked.map((each, at) => {
        const probability = Math.exp(Math.min(0, each.logprob));
        return html`<tr key=${at} class=${at === rank ? "marked" : ""}>
          <td class="number soft">${at + 1}</td>
          <td><code>${quoted(each.text)}</code>${at === rank && html` <span class="soft">sampled</span>`}</td>
          <td class="number">${percent(probability)}</td>
          <td class="meter"><span style=${{ width: `${100 * probability}%` }}></span></td>
        </tr>`;
      })}
    </tbody>
  </table>`;
}

/** The text with everything invisible in it written out. */
function quoted(text) {
  if (text === "") return "◌ part of a character";
  return JSON.stringify(text)
    .slice(1, -1)
    .replaceAll('\\"', '"')
    .replaceAll(" ", "·")
    .replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (hidden) => `\\u{${hidden.codePointAt(0).toString(16)}}`);
}
