// Why did this rollout get its reward? The verdict first, then the task, the calls, the conversation and the errors.
import { html, useCallback } from "../vendor/preact.js";
import { link, navigate, useApi } from "../api.js";
import { useKeys } from "../keys.js";
import { Attempts } from "../parts/attempts.js";
import { CallTree } from "../parts/calltree.js";
import { Chip } from "../parts/chip.js";
import { CreditLine, SOURCES, toneOf } from "../parts/credit.js";
import { counted, signed } from "../parts/digits.js";
import { Loading } from "../parts/empty.js";
import { ErrorBox } from "../parts/error.js";
import { Fields } from "../parts/fields.js";
import { Branched, BranchWords, Void } from "../parts/forked.js";
import { duration, figure } from "../parts/figures.js";
import { FailedTool, Message } from "../parts/message.js";
import { Folded, visible } from "../parts/plain.js";
import { against, Siblings } from "../parts/siblings.js";
import { Spans } from "../parts/spans.js";
import { Status } from "../parts/status.js";
import { Timeline } from "../parts/timeline.js";

const UNFINISHED = new Set(["queued", "running"]);
const LONG = 12; // calls; of longer conversations, only what is in sight is laid out

export default function RolloutView({ route }) {
  const { run, rollout, query } = route;
  const asked = query.attempt ? `?attempt=${encodeURIComponent(query.attempt)}` : "";
  const path = `/api/runs/${encodeURIComponent(run)}/rollouts/${encodeURIComponent(rollout)}${asked}`;
  const { data, error, path: whose } = useApi(path, { live: "rollouts" });
  const stale = whose !== path; // the data of another rollout or attempt, until this one's has arrived
  const siblings = data?.siblings.map(({ id }) => id) ?? [];
  const go = (by) => () => {
    const next = siblings.includes(rollout) ? siblings[siblings.indexOf(rollout) + by] : undefined;
    return next === undefined ? false : navigate(link(run, "rollout", next));
  };
  useKeys([
    ["]", "next rollout of the group", go(1)],
    ["[", "rollout of the group before", go(-1)],
    ["g", "its group, side by side", () => siblings.includes(rollout) && navigate(link(run, "group", data.group.id))],
    ["j", "next call", () => focusCall(1)],
    ["k", "call before", () => focusCall(-1)],
    ["Enter", "open the call", () => false],
  ]);
  if (error && (!data || stale)) return html`<${ErrorBox} error=${error} title="This rollout cannot be shown" />`;
  if (!data) return html`<${Loading} />`;
  return html`<${Shown} run=${run} data=${data} attempt=${query.attempt} stale=${stale} />`;
}

/** Move the focus to the next or previous call of the conversation. */
function focusCall(by) {
  const links = [...document.querySelectorAll(".call > header a")];
  const at = links.indexOf(document.activeElement);
  const next = links[at < 0 ? 0 : at + by];
  next?.focus();
  next?.closest(".call").scrollIntoView({ block: "nearest" });
  return next !== undefined;
}

function showCall(number) {
  const call = document.getElementById(`call-${number}`);
  call?.scrollIntoView({ block: "start", behavior: "smooth" });
  call?.querySelector("header a").focus({ preventScroll: true });
}

function Shown({ run, data, attempt, stale }) {
  const href = useCallback((number) => link(run, "rollout", data.rollout, "call", number, { attempt }), [run, data.rollout, attempt]);
  const shown = data.attempts.find((each) => each.id === data.attempt);
  return html`<div class=${`stack ${stale ? "stale" : ""}`}>
    <${Verdict} run=${run} data=${data} shown=${shown} />
    <div class="pair">
      <section class="card"><h2>The task</h2><p class="soft">${visible(data.task.id)} · ${visible(data.task.split)}</p><${Fields} value=${data.task.input} /></section>
      <section class="card"><h2>What the agent returned</h2><${Outcome} shown=${shown} /></section>
    </div>
    ${data.calls.length > 0 && html`<section>
      <h2>${counted(data.calls.length, "call")}${data.spans?.length ? `, ${counted(data.spans.length, "tool call")} and other events` : ""}</h2>
      <${Timeline} calls=${data.calls} spans=${data.spans ?? []} from=${shown?.started_at} to=${shown?.ended_at} onCall=${showCall} />
      <${CallTree} calls=${data.calls} href=${href} />
    </section>`}
    <${Conversation} calls=${data.calls} places=${placesIn(data)} href=${href} waits=${UNFINISHED.has(data.status)} />
    <${Attempts} run=${run} rollout=${data.rollout} attempts=${data.attempts} shown=${shown} logs=${data.logs} />
    <${Spans} spans=${data.spans ?? []} from=${shown?.started_at} href=${href} />
  </div>`;
}

/** The words about the credit, if they are the same for all calls; else null. */
function sameCredit(calls) {
  const words = new Set(calls.filter((call) => !call.replays).map((call) => call.credit?.words ?? null));
  return words.size === 1 ? [...words][0] : null;
}

function Verdict({ run, data, shown }) {
  const { reward, group } = data;
  const tone = data.siblings.length > 1 ? against(reward, group.mean) : "none";
  return html`<header>
    <div class="row apart">
      <h1>${visible(data.rollout)} <${Status} status=${data.status} /></h1>
      <span class="soft">${data.step === null ? "" : `step ${data.step} · `}${counted(data.calls.length, "call")} · ${counted(data.calls.reduce((sum, call) => sum + call.sampled_tokens, 0), "token")} sampled${shown?.ended_at ? ` · ${duration(shown.ended_at - shown.started_at)}` : ""}</span>
    </div>
    <div class=${`verdict card ${tone}`}>
      <div class="big" title="The final reward">${reward === null ? "–" : figure(reward)}<span>reward</span></div>
      <div class="why">
        ${reasons(run, data, shown).map((reason, at) => html`<p key=${at}>${reason}</p>`)}
      </div>
    </div>
    <${Siblings} run=${run} group=${group.id} mean=${group.mean} siblings=${data.siblings} rollout=${data.rollout} />
  </header>`;
}

/** Why this reward, how that compares, and what it taught: one sentence each. */
function reasons(run, data, shown) {
  const found = [];
  if (data.branch) found.push(html`<${BranchWords} run=${run} branch=${data.branch} rollout=${data.rollout} />`);
  if (data.branches.length) found.push(html`<${Branched} run=${run} branches=${data.branches} rollout=${data.rollout} />`);
  if (data.branch?.void) found.push(html`<${Void} branch=${data.branch} />`);
  else if (shown?.error) found.push(html`<strong class="bad">${visible(shown.error.split("\n")[0])}</strong>`);
  if (data.reward === null && !shown?.error) found.push(data.status === "running" ? "It is still running." : `It is ${data.status} and has no reward.`);
  const given = data.rewards.map((reward) => `${reward.source === "air" ? signed(reward.value) : figure(reward.value)} ${reward.name}, ${SOURCES[reward.source] ?? reward.source}`);
  if (given.length) found.push(html`<strong>Rewards:</strong> ${visible(given.join("; "))}`);
  const compared = comparison(data);
  if (compared) found.push(compared);
  if (!UNFINISHED.has(data.status)) found.push(taught(data));
  const credit = sameCredit(data.calls);
  if (credit) found.push(html`<strong>Credit of each call:</strong> ${visible(credit)}`);
  else if (data.credit && !data.teaching.why_not) found.push(html`<strong>Credit:</strong> ${data.credit.words}`);
  return found;
}

function comparison({ reward, group, siblings, rollout }) {
  const among = siblings.filter(({ id, trunk }) => trunk === null || id === rollout); // branches repeat their trunk
  const known = among.map((each) => each.reward).filter((each) => each !== null);
  if (reward === null || known.length < 2) return null;
  const better = known.filter((each) => each > reward + 1e-9).length;
  const worse = known.filter((each) => each < reward - 1e-9).length;
  const words = [better && `${better} did better`, worse && `${worse} did worse`].filter(Boolean).join(", ");
  return html`<strong>Its group:</strong> ${words || "all did the same"}; the mean${among.length < siblings.length ? " without branches" : ` of ${known.length}`} is ${figure(group.mean)}.`;
}

function taught({ teaching, calls, step }) {
  if (teaching.why_not) return html`<strong>It taught nothing:</strong> ${visible(teaching.why_not)}.`;
  const advantages = calls.filter((call) => call.left_out === null && call.advantage !== null).map((call) => call.advantage);
  if (!advantages.some(Boolean)) return html`<strong>It taught nothing:</strong> its advantage is 0.`;
  const [low, high] = [Math.min(...advantages), Math.max(...advantages)];
  const span = low === high ? signed(low) : `${signed(low)} to ${signed(high)}`;
  const words = low < 0 && high > 0 ? "the sign of each call says whether its tokens are pushed up or down" : `so ${toneOf(high > 0 ? high : low)[1]}`;
  return html`<strong>${teaching.learnt ? `Step ${step} learnt from it` : `Step ${step} will learn from it`}:</strong> advantage ${span}, ${words}. Other rollouts push the same tokens too: the colour <em>ratio</em> of a call shows the sum.`;
}

function Outcome({ shown }) {
  if (!shown) return html`<p class="soft">No attempt has begun.</p>`;
  if (shown.status === "running") return html`<p class="soft">It is still running.</p>`;
  if (shown.error) return html`<p>Nothing, it ended with an error:</p><div class="bad"><${Folded} text=${shown.error} lines=${24} mono /></div>`;
  return html`<${Fields} value=${shown.output} />`;
}

/** Numbers of the calls where several answers were sampled. */
function placesIn({ branch, branches }) {
  return new Set([branch?.here, ...branches.map(({ call }) => call)].filter(Boolean));
}

function Conversation({ calls, href, waits, places }) {
  if (calls.length === 0 && waits) return html`<section class="card soft">No call has been answered yet.</section>`;
  if (calls.length === 0) return html`<section class="card"><strong>The agent did not call the model.</strong> <span class="soft">Does it use the address in its environment (OPENAI_BASE_URL)?</span></section>`;
  const same = sameCredit(calls) !== null;
  const results = new Set(calls.flatMap((call) => call.messages.map((message) => message.content)));
  return html`<section class=${`conversation ${calls.length > LONG ? "long" : ""}`}>
    <h2>The conversation, as the agent sent it</h2>
    ${calls.map((call) => html`<${CallPart} key=${call.id} call=${call} href=${href} results=${results} words=${!same} places=${places} />`)}
  </section>`;
}

function CallPart({ call, href, results, words, places }) {
  const failed = call.tools.filter((tool) => tool.status === "error");
  return html`<section class=${`call ${call.replays ? "played" : ""}`} id=${`call-${call.number}`} aria-label=${`Call ${call.number}`}>
    <header>
      <a href=${href(call.number)} title="Its tokens, as the engine read and sampled them">call ${call.number}${call.agent && html` · ${visible(call.agent)}`}</a>
      ${places.has(call.number) && html`<${Chip} tone="place" title="Its prompt was answered several times: see the siblings">branching call<//>`}
      <span class="soft">${visible(call.origin)}${call.replays ? "" : ` · ${counted(call.sampled_tokens, "token")}`} · ${duration(call.seconds)}${call.finish_reason === "length" ? " · cut off at the token limit" : ""}${call.grammar ? " · under a grammar" : ""}</span>
      <${CreditLine} call=${call} />
    </header>
    ${words && call.credit && html`<p class="soft">${visible(call.credit.words)}</p>`}
    ${call.messages.map((message, at) => html`<${Message} key=${at} message=${message} />`)}
    ${call.answer ? html`<${Message} message=${call.answer} fresh />` : html`<p class="soft">${call.capture === "incomplete" ? "There is no answer." : "The answer cannot be read."}</p>`}
    ${failed.map((tool, at) => html`<${FailedTool} key=${at} tool=${tool} told=${results.has(tool.error) || results.has(tool.output)} />`)}
  </section>`;
}
