// When did the calls and the tools run, and which at the same time? Parallel ones lie in lanes of their own.
import { html, useState } from "../vendor/preact.js";
import { visible } from "./plain.js";
import { duration } from "./figures.js";

const COLOURS = 6;
const LANE = 26; // px

/** `calls`, `spans` of the API; `from`, `to`: Unix seconds of the attempt; `onCall(number)`: somebody chose a call. */
export function Timeline({ calls, spans, from, to, onCall }) {
  const [told, setTold] = useState(null);
  const agents = [...new Set(calls.map((call) => call.agent))];
  const begin = Math.min(from ?? Infinity, ...calls.map((call) => call.started_at));
  const end = Math.max(to ?? 0, ...calls.map((call) => call.ended_at), ...spans.map((span) => span.ended_at));
  if (!(end > begin)) return null;
  const items = [...calls.map((call) => callItem(call, agents)), ...spans.map(spanItem)];
  const lanes = 1 + Math.max(...items.map((item) => item.lane));
  const place = ({ from: at, to: until }) => ({ left: `${share(at - begin, end - begin)}%`, width: `${share(until - at, end - begin)}%` });
  const bar = (item) => html`<button type="button" key=${item.key} class=${`bar ${item.tone}`} style=${{ ...place(item), top: `${item.lane * LANE}px` }}
    aria-label=${item.words} title=${item.words} onMouseEnter=${() => setTold(item)} onFocus=${() => setTold(item)} onClick=${() => item.call !== null && onCall(item.call)}>${item.label}</button>`;
  return html`<div class="timeline">
    <div class="lanes" style=${{ height: `${lanes * LANE}px` }}>
      ${ticks(end - begin).map((at) => html`<span key=${at} class="tick" style=${{ left: `${share(at, end - begin)}%` }}>${at < 0.94 * (end - begin) && html`<span>${duration(at)}</span>`}</span>`)}
      ${items.map(bar)}
    </div>
    <p class="told soft">${told === null ? keyOf(agents, spans.length > 0, calls.some((call) => call.replays)) : html`${told.words}, ${duration(told.from - begin)} after the beginning`}</p>
  </div>`;
}

function callItem(call, agents) {
  const by = call.agent ? ` by ${call.agent}` : "";
  const what = call.replays ? call.origin : `${call.sampled_tokens} tokens`;
  return {
    key: call.id,
    from: call.started_at,
    to: call.ended_at,
    lane: call.lane,
    call: call.number,
    tone: `call-${(agents.indexOf(call.agent) % COLOURS) + 1} ${call.replays ? "played" : ""}`,
    label: `${call.number}`,
    words: `call ${call.number}${by}: ${duration(call.ended_at - call.started_at)}, ${what}`,
  };
}

function spanItem(span) {
  const failed = span.status === "error";
  const words = `${span.kind} ${span.name}: ${duration(span.ended_at - span.started_at)}${failed ? ", failed" : ""}`;
  return { key: span.id, from: span.started_at, to: span.ended_at, lane: span.lane, call: span.call, tone: failed ? "failed" : "tool", label: visible(span.name), words };
}

function keyOf(agents, tools, played) {
  const named = agents.filter(Boolean);
  return html`${named.map((agent) => html`<span key=${agent} class="key"><span class=${`swatch bar call-${(agents.indexOf(agent) % COLOURS) + 1}`}></span> calls by ${visible(agent)}</span>`)}
    ${tools && html`<span class="key"><span class="swatch bar tool"></span> tools</span>`} ${played && html`<span class="key"><span class="swatch bar call-1 played"></span> played back</span>`} <span>The gaps are the agent's own work.</span>`;
}

function share(part, whole) {
  return Math.max(0, Math.min(100, (100 * part) / whole));
}

/** Three to six round times. */
function ticks(seconds) {
  const rough = seconds / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  return Array.from({ length: Math.floor(seconds / step) + 1 }, (_, at) => at * step);
}
