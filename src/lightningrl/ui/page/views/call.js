// What did the model read and answer in one call, token by token, and which token was pushed up or down?
import { html, useCallback, useEffect, useState } from "../vendor/preact.js";
import { link, navigate, setQuery, useApi } from "../api.js";
import { useKeys } from "../keys.js";
import { Chip } from "../parts/chip.js";
import { SCALES, scaleNamed } from "../parts/colours.js";
import { Copy } from "../parts/copy.js";
import { counted, signed } from "../parts/digits.js";
import { Loading } from "../parts/empty.js";
import { ErrorBox } from "../parts/error.js";
import { duration } from "../parts/figures.js";
import { Json } from "../parts/json.js";
import { Legend, StandOut } from "../parts/legend.js";
import { Message } from "../parts/message.js";
import { visible } from "../parts/plain.js";
import { TokenCard } from "../parts/tokencard.js";
import { Origins, showToken, Tokens } from "../parts/tokens.js";

export default function CallView({ route }) {
  const { run, rollout, query } = route;
  const number = Number(route.call);
  const asked = query.attempt ? `?attempt=${encodeURIComponent(query.attempt)}` : "";
  const above = `/api/runs/${encodeURIComponent(run)}/rollouts/${encodeURIComponent(rollout)}`;
  const path = `${above}/calls/${number}${asked}`;
  const { data, error, path: whose } = useApi(path);
  const whole = useApi(`${above}${asked}`);
  const href = useCallback((other) => link(run, "rollout", rollout, "call", other, { ...query }), [run, rollout, query]);
  const total = whole.data?.calls?.length ?? null;
  const go = (by) => () => {
    const next = number + by;
    if (next < 1 || (total !== null && next > total)) return false;
    return navigate(href(next));
  };
  useKeys([["j", "next call", go(1)], ["k", "call before", go(-1)], ["]", "next call", go(1)], ["[", "call before", go(-1)], ["c", "next colour", () => data && nextColour(query, data)]]);
  if (error) return html`<${ErrorBox} error=${error} title="This call cannot be shown" />`;
  if (!data) return html`<${Loading} />`;
  return html`<${Shown} call=${data} total=${total} query=${query} href=${href} run=${run} rollout=${rollout} stale=${whose !== path} />`;
}

function nextColour(query, call) {
  const names = Object.keys(SCALES);
  setQuery({ color: names[(names.indexOf(scaleNamed(query.color, call.tokens)) + 1) % names.length] });
}

function Shown({ call, total, query, href, run, rollout, stale }) {
  const show = ["tokens", "messages"].includes(query.show) ? query.show : "both";
  return html`<div class=${`stack ${stale ? "stale" : ""}`}>
    <${Head} run=${run} call=${call} total=${total} href=${href} back=${link(run, "rollout", rollout, { attempt: query.attempt })} />
    <div class="segments show" role="group" aria-label="What is shown">
      ${[["both", "messages and tokens"], ["messages", "messages"], ["tokens", "tokens"]].map(
        ([name, words]) => html`<button key=${name} type="button" aria-pressed=${name === show} onClick=${() => setQuery({ show: name === "both" ? null : name })}>${words}</button>`,
      )}
    </div>
    <div class=${`call-columns ${show}`}>
      ${show !== "tokens" && html`<${Messages} call=${call} href=${href} />`}
      ${show !== "messages" && html`<${TokenSide} call=${call} scale=${scaleNamed(query.color, call.tokens)} href=${href} />`}
    </div>
    <${Raw} call=${call} />
  </div>`;
}

function Head({ run, call, total, href, back }) {
  const { number, agent, policy, policy_version: version, left_out: leftOut, advantage } = call;
  const trained = advantage !== null && leftOut === null;
  return html`<header>
    <div class="row apart">
      <h1>Call ${number}${total ? ` of ${total}` : ""}${agent && html` by ${visible(agent)}`}</h1>
      <nav class="row" aria-label="Calls of this rollout">
        ${number > 1 && html`<a class="button" href=${href(number - 1)}>← call ${number - 1}</a>`}
        ${total !== null && number < total && html`<a class="button" href=${href(number + 1)}>call ${number + 1} →</a>`}
        <a class="button" href=${back}>whole rollout</a>
      </nav>
    </div>
    <p class="row">
      ${trained && html`<${Chip} tone=${tone(advantage)} title="How much better than its group: its tokens are pushed up (+) or down (−)">advantage ${signed(advantage)}<//>`}
      ${leftOut && !call.replays && html`<${Chip} tone="warn">not trained: ${visible(leftOut)}<//>`}
      ${call.replays && html`<${Chip} title="It cost no tokens, and is not trained again">played back<//>`}
      ${call.replays?.rollout && html`<a href=${link(run, "rollout", call.replays.rollout, "call", call.replays.call)}>the recorded call</a>`}
      ${call.sampling?.grammar && html`<${Chip}>under a grammar<//>`}
      <span class="soft">${visible(call.origin)} · answered by ${visible(policy)}, version ${version} · ${counted(call.prompt_tokens, "token")} read, ${call.sampled_tokens} sampled in ${duration(call.seconds)}${endOf(call.finish_reason)}</span>
    </p>
    ${call.credit?.words && html`<p><strong>Credit:</strong> ${visible(call.credit.words)}</p>`}
  </header>`;
}

function tone(advantage) {
  if (advantage === 0) return "";
  return advantage > 0 ? "up" : "down";
}

function endOf(reason) {
  const words = { length: "cut off at the token limit", cancelled: "cancelled", error: "broken off by an error" };
  return reason in words ? ` · ${words[reason]}` : "";
}

function Messages({ call, href }) {
  const earlier = call.earlier_messages;
  return html`<section class="messages" aria-label="Messages">
    <h2>Messages</h2>
    ${earlier > 0 && html`<p class="soft">${counted(earlier, "message")} as ${call.parent === null ? "before" : html`in <a href=${href(call.parent)}>call ${call.parent}</a>`}, then:</p>`}
    ${call.messages.map((message, at) => html`<${Message} key=${at} message=${message} />`)}
    ${call.answer ? html`<${Message} message=${call.answer} fresh />` : html`<p class="soft">${call.capture === "incomplete" ? "There is no answer." : "The answer cannot be read."}</p>`}
  </section>`;
}

function TokenSide({ call, scale, href }) {
  const [{ place, pinned }, setChosen] = useState({ place: null, pinned: false });
  useEffect(() => setChosen({ place: null, pinned: false }), [call.id]);
  const choose = useCallback((next, pin) => setChosen((old) => chosenNext(old, next, pin)), []);
  const read = call.tokens.prompt.ids.length;
  const last = read + call.tokens.sampled.ids.length - 1;
  const step = (by) => () => {
    const next = Math.max(0, Math.min(last, place === null ? read : place + by));
    setChosen({ place: next, pinned: true });
    showToken(next);
  };
  useKeys([
    ["ArrowRight", "next token", step(1)],
    ["ArrowLeft", "token before", step(-1)],
    ["Escape", "let the token go", () => setChosen({ place: null, pinned: false })],
  ]);
  const pin = (next) => {
    setChosen({ place: next, pinned: true });
    showToken(next);
  };
  return html`<section class="token-side" aria-label="Tokens">
    <h2>Tokens, as the engine read and sampled them</h2>
    <${Legend} call=${call} scale=${scale} />
    <${StandOut} call=${call} scale=${scale} onPlace=${pin} />
    <${Origins} call=${call} />
    ${call.tokens.sampled.texts === null && html`<p class="warn-text">No tokenizer was found for this policy, so these are token ids.</p>`}
    <${Tokens} call=${call} scale=${scale} place=${place} onPlace=${choose} href=${href} />
    <${TokenCard} call=${call} place=${place} pinned=${pinned} />
  </section>`;
}

/** A click keeps a token, a second one lets it go; meanwhile the pointer chooses no other. */
function chosenNext(old, place, pin) {
  if (pin) return { place, pinned: !(old.pinned && old.place === place) };
  return old.pinned || old.place === place ? old : { place, pinned: false };
}

function Repeat({ copies }) {
  const forms = [["as curl", copies.curl], ["as Python", copies.python], ["as a test case", copies.test]];
  return html`<div>
    <div class="row"><strong>Repeat this call</strong>${forms.map(([words, text]) => html`<${Copy} key=${words} label=${`copy ${words}`} text=${text} />`)}</div>
    <details class="copies"><summary class="soft">what these copy</summary>${forms.map(([words, text]) => html`<h3 key=${words}>${words}</h3><pre class="card">${visible(text)}</pre>`)}</details>
  </div>`;
}

function Raw({ call }) {
  return html`<section class="stack">
    ${call.copies && html`<${Repeat} copies=${call.copies} />`}
    <details class="raw"><summary>The request, as JSON (${visible(call.dialect)})</summary><${Json} value=${call.request} open=${2} /></details>
    <details class="raw"><summary>The response, as JSON</summary><${Json} value=${call.response} open=${2} /></details>
    <details class="raw"><summary>How it was sampled</summary><${Json} value=${call.sampling} open=${2} /></details>
  </section>`;
}
