// How did each rollout do against the mean of its group? The distance to the mean is what a group-relative advantage is.
import { html } from "../vendor/preact.js";
import { link } from "../api.js";
import { Chip, StatusChip } from "./chip.js";
import { CreditChip } from "./credit.js";
import { counted } from "./digits.js";
import { duration, figure } from "./figures.js";
import { visible } from "./plain.js";
import { nameIn } from "./siblings.js";

/** `members` of the API; one bar each, from the mean of the group to the reward. */
export function Ladder({ run, group, members, mean }) {
  const known = members.map((member) => member.reward).filter((reward) => reward !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const ranked = [...members].sort((one, other) => (other.reward ?? -Infinity) - (one.reward ?? -Infinity));
  const at = (reward) => (high === low ? 50 : 4 + (92 * (reward - low)) / (high - low));
  return html`<ol class=${`ladder ${members.some(({ trunk }) => trunk !== null) ? "branched" : ""}`} aria-label="The rollouts, best first">
    <li class="axis" aria-hidden="true"><span></span><div class="track"><span class="mean-words" style=${{ left: `${at(mean ?? low)}%` }}>mean ${figure(mean)}</span></div></li>
    ${ranked.map(
      (member) => html`<li key=${member.id}>
        <a href=${link(run, "rollout", member.id)} title=${member.id}>${visible(nameIn(group, member.id))}</a>
        <div class="track">
          ${mean !== null && html`<span class="mean" style=${{ left: `${at(mean)}%` }}></span>`}
          ${member.reward !== null && mean !== null && html`<${Distance} from=${at(mean)} to=${at(member.reward)} reward=${member.reward} />`}
        </div>
        <span class="what">
          ${member.reward === null ? html`<${StatusChip} status=${member.status} />` : html`<span class="soft">reward</span> <strong>${figure(member.reward)}</strong>`}
          <${CreditChip} call=${{ advantage: member.advantage, left_out: null }} />
          ${member.trunk !== null && html`<${Chip} title=${`It repeats ${member.trunk}, and answers this call afresh`}>branch of ${visible(nameIn(group, member.trunk))}${member.place === null ? "" : ` at call ${member.place}`}<//>`}
          <span class="soft">${counted(member.calls, "call")}, ${counted(member.tokens, "token")}, ${duration(member.seconds)}</span>
        </span>
      </li>`,
    )}
  </ol>`;
}

function Distance({ from, to }) {
  const tone = to < from ? "down" : "up";
  return html`<span class=${`distance ${tone}`} style=${{ left: `${Math.min(from, to)}%`, width: `${Math.abs(to - from)}%` }}></span><span class=${`dot ${tone}`} style=${{ left: `${to}%` }}></span>`;
}
