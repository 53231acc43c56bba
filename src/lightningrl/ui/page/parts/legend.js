// What do the colours of the sampled tokens mean, and which tokens stand out?
import { html } from "../vendor/preact.js";
import { setQuery } from "../api.js";
import { SCALES, strength, toneOf, whyNothing } from "./colours.js";
import { Words } from "./error.js";
import { marked } from "./plain.js";
import { textOf } from "./sequence.js";

const STAND_OUT = 6;

/** The choice of colours, their scale, and the reason if there is nothing to show. */
export function Legend({ call, scale }) {
  const chosen = SCALES[scale];
  const why = whyNothing(scale, call.tokens);
  const values = chosen.values(call.tokens.sampled);
  return html`<div class="token-legend">
    <div class="segments" role="group" aria-label="Colour of the sampled tokens">
      ${Object.entries(SCALES).map(
        ([name, { title }]) =>
          html`<button key=${name} type="button" aria-pressed=${name === scale} onClick=${() => setQuery({ color: name })}>${title}</button>`,
      )}
    </div>
    ${why === null
      ? html`<p class="soft">${chosen.question}</p><${Scale} scale=${chosen} bound=${chosen.bound(values)} />`
      : html`<p class="warn-text" role="status">No ${chosen.title} to show: <${Words} text=${why} />.</p>`}
  </div>`;
}

function Scale({ scale, bound }) {
  return html`<div class="scale">
    <div class=${scale.diverging ? "ramp diverging" : "ramp"}></div>
    <div class="ticks">${scale.ticks(bound).map((tick) => html`<span key=${tick}>${tick}</span>`)}</div>
  </div>`;
}

/** The tokens with the strongest colours, to jump to. */
export function StandOut({ call, scale, onPlace }) {
  const chosen = SCALES[scale];
  const { sampled, prompt } = call.tokens;
  const values = chosen.values(sampled);
  if (!values?.length) return null;
  const same = values.every((value) => Math.abs(value - values[0]) < 1e-9);
  if (same && values.length > 1) {
    return html`<p class="soft">All ${values.length} tokens: ${chosen.title} ${chosen.write(values[0])}.${ofAll(scale, values[0])}</p>`;
  }
  const bound = chosen.bound(values);
  const places = values.map((value, at) => at).filter((at) => Math.abs(chosen.heat(values[at], bound)) > 0.02);
  places.sort((one, other) => Math.abs(chosen.heat(values[other], bound)) - Math.abs(chosen.heat(values[one], bound)));
  if (places.length === 0) return null;
  return html`<div class="stand-out">
    <span class="soft">${WORDS[scale]}:</span>
    ${places.slice(0, STAND_OUT).map((at) => {
      const { tone, share } = toneOf(chosen, values[at], bound);
      return html`<button key=${at} type="button" class="small" onClick=${() => onPlace(prompt.ids.length + at, true)}>
        <code class=${`token ${tone}`} style=${strength(share)}>${marked(textOf(sampled, at)).replaceAll(" ", "·").replaceAll("\n", "")}</code> ${chosen.write(values[at])}
      </button>`;
    })}
  </div>`;
}

const WORDS = {
  logprob: "Least likely",
  advantage: "Pushed most",
  ratio: "Changed most",
  entropy: "Most undecided",
};

function ofAll(scale, value) {
  if (scale !== "advantage" || value === 0) return "";
  return value > 0 ? " They were pushed up together, as the whole answer was judged." : " They were pushed down together, as the whole answer was judged.";
}
