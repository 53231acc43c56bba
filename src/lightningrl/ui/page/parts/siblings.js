// How did the other rollouts of the group do? A strip of their rewards, each a link.
import { html } from "../vendor/preact.js";
import { link } from "../api.js";
import { figure } from "./figures.js";
import { visible } from "./plain.js";

/** "good" from the mean on, "bad" below it, "none" without a reward. */
export function against(reward, mean) {
  if (reward === null || reward === undefined) return "none";
  return mean === null || reward >= mean - 1e-9 ? "good" : "bad";
}

/** The last part of an id: rollouts of a group differ in it alone. */
export function nameIn(group, id) {
  return id.startsWith(`${group}-`) ? id.slice(group.length + 1) : id;
}

function isBranch({ trunk }) {
  return trunk !== null;
}

function triedBy(siblings) {
  const branches = siblings.filter(isBranch).length;
  return branches === 0 ? `${siblings.length} tried this task` : `${siblings.length - branches} tried this task, ${branches} branched off`;
}

/** `siblings`: [{id, reward, status, trunk}], the rollout itself among them. */
export function Siblings({ run, group, mean, siblings, rollout }) {
  if (siblings.length < 2) return html`<p class="soft">Only this rollout tried the task, so there is nothing to compare it with.</p>`;
  return html`<nav class="siblings" aria-label="Rollouts of the same group">
    <span class="soft">${triedBy(siblings)}${mean === null ? "" : `, ${siblings.some(isBranch) ? "mean without branches" : "mean"} ${figure(mean)}`}:</span>
    <ol>
      ${siblings.map(
        ({ id, reward, status, trunk }) => html`<li key=${id}>
          <a class=${`sibling ${against(reward, mean)} ${trunk === null ? "" : "branched"}`} href=${link(run, "rollout", id)} aria-current=${id === rollout ? "page" : undefined}
            title=${`${id}${trunk === null ? "" : `, a branch of ${trunk}`}: ${reward === null ? `${status}, no reward` : `reward ${figure(reward)}`}`}>
            <span class="soft">${visible(nameIn(group, id))}</span> ${reward === null ? status : figure(reward)}
          </a>
        </li>`,
      )}
    </ol>
    <a class="button" href=${link(run, "group", group)}>compare side by side</a>
  </nav>`;
}
