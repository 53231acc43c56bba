// Where do the rollouts of a group part, and what did each branch earn? A tree of their answers, best branches first.
import { html } from "../vendor/preact.js";
import { link } from "../api.js";
import { branchesOf, isDeep, sharedLength, wordsOf } from "./branching.js";
import { AdvantageChip } from "./credit.js";
import { counted } from "./digits.js";
import { figure } from "./figures.js";
import { Message } from "./message.js";
import { Folded, visible } from "./plain.js";
import { against, nameIn } from "./siblings.js";

const CALLS = 6; // of a branch are shown at first
const SHARED = 24; // characters that neighbours share at their beginning before these are dimmed

export function Branches({ run, data }) {
  const roots = branchesOf(data.nodes);
  return html`<div class=${`scroll ${isDeep(data.nodes) ? "downwards" : ""}`} tabindex="0" role="region" aria-label="Tree of branches"><${Children} run=${run} data=${data} branches=${roots} /></div>`;
}

function Children({ run, data, branches, before = null }) {
  const texts = branches.map((branch) => wordsOf(branch.nodes[0].answer));
  const shared = sharedLength(texts.length > 1 || before === null ? texts : [...texts, wordsOf(before.answer)]);
  return html`<ul class="branches">
    ${branches.map((branch) => html`<${Branch} key=${branch.nodes[0].id} run=${run} data=${data} branch=${branch} shared=${shared} />`)}
  </ul>`;
}

function Branch({ run, data, branch, shared }) {
  const [first] = branch.nodes;
  return html`<li>
    <div role="group" class=${`branch ${against(first.reward, data.mean)}`} aria-label=${`${counted(first.members.length, "rollout")}, mean reward ${figure(first.reward)}`}>
      <header class="row">
        <strong class=${against(first.reward, data.mean)}>${figure(first.reward)}</strong>
        <span class="soft">${meanOf(first)}</span>
      </header>
      ${branch.nodes.slice(0, CALLS).map((node, at) => html`<${Step} key=${node.id} run=${run} data=${data} node=${node} shared=${at === 0 ? shared : 0} />`)}
      ${branch.nodes.length > CALLS && html`<details><summary>${counted(branch.nodes.length - CALLS, "more call")}</summary>${branch.nodes.slice(CALLS).map((node) => html`<${Step} key=${node.id} run=${run} data=${data} node=${node} shared=${0} />`)}</details>`}
      <${Members} run=${run} data=${data} node=${branch.nodes.at(-1)} />
    </div>
    ${branch.below.length > 0 && html`<${Children} run=${run} data=${data} branches=${branch.below} before=${branch.nodes.at(-1)} />`}
  </li>`;
}

/** Whose mean it is. A branch that played the call back is told, but the call was sampled once. */
function meanOf({ members, played_back: played }) {
  const sampled = members.length - played.length;
  const rollouts = sampled === 1 ? "one rollout" : `${sampled} rollouts`;
  if (played.length === 0) return sampled === 1 ? rollouts : `mean of ${rollouts}`;
  return `${rollouts}; ${played.length === 1 ? "one branch" : `${played.length} branches`} played it back`;
}

/** One call: what came back since the call before, folded to a line, and the answer from where it differs. */
function Step({ run, data, node, shared }) {
  const text = wordsOf(node.answer);
  const common = shared >= SHARED ? shared : 0;
  const rest = text.slice(common);
  return html`<div class="branch-call">
    ${node.messages.map((message, at) => html`<div key=${at} class="came-back"><span class="role">${visible(message.role)}</span> <${Folded} text=${message.content} lines=${2} characters=${140} /></div>`)}
    ${node.agent && html`<span class="role">${visible(node.agent)}</span>`}
    ${node.siblings.length > 0 && html`<div class="at-place"><span class="soft">${node.siblings.length === 1 ? "sibling" : "siblings"}</span><${Links} run=${run} data=${data} node=${node} ids=${node.siblings} /></div>`}
    ${node.answer === null
      ? html`<p class="soft">The answer broke off.</p>`
      : html`<div class="answer">${common > 0 && html`<span class="common" title="The others beside it, or the answer before, begin with this">${visible(text.slice(0, common))}</span>`}${rest && html`<${Folded} text=${rest} lines=${8} characters=${500} />`}</div>`}
  </div>`;
}

/** The rollouts that went this way, with the advantage of this call; those that played it back have none. */
function Members({ run, data, node }) {
  const told = new Set([...node.siblings, ...node.played_back]);
  return html`<${Links} run=${run} data=${data} node=${node} ids=${node.members.filter((id) => !told.has(id))} />`;
}

function Links({ run, data, node, ids }) {
  if (ids.length === 0) return null;
  return html`<ul class="members">
    ${ids.map(
      (id) => html`<li key=${id}>
        <a href=${link(run, "rollout", id, "call", node.calls[id])} title=${`${id}: the tokens of this call`}>${visible(nameIn(data.group, id))}</a>
        ${node.advantages[id] !== undefined && html` <${AdvantageChip} advantage=${node.advantages[id]} />`}
      </li>`,
    )}
  </ul>`;
}

/** The messages that all rollouts began with. */
export function Trunk({ messages }) {
  if (messages.length === 0) return html`<p class="soft">They began differently.</p>`;
  return html`<div class="trunk">${messages.map((message, at) => html`<${Message} key=${at} message=${message} />`)}</div>`;
}
