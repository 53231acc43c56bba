// What was a call worth, and how did that come about? Its rewards, its advantage, or why it is not trained.
import { html } from "../vendor/preact.js";
import { Chip } from "./chip.js";
import { signed } from "./digits.js";
import { figure } from "./figures.js";
import { visible } from "./plain.js";

export const SOURCES = {
  grader: "by the reward function",
  air: "by a rule (AIR)",
  agent: "by the agent",
  system: "by LightningRL",
};

/** Advantage, or the reason why there is none. */
export function CreditChip({ call }) {
  if (call.replays) return html`<${Chip} title="It cost no tokens, and is not trained again">played back<//>`;
  if (call.left_out) return html`<${Chip} tone="warn" title=${call.left_out}>not trained<//>`;
  if (call.advantage === null || call.advantage === undefined) return null;
  return html`<${AdvantageChip} advantage=${call.advantage} />`;
}

export function AdvantageChip({ advantage }) {
  const [tone, words] = toneOf(advantage);
  return html`<${Chip} tone=${tone} title=${`Advantage: ${words}`}>${arrow(advantage)} ${signed(advantage)}<//>`;
}

/** ["up" | "down" | "", what that means]. */
export function toneOf(advantage) {
  if (advantage > 0) return ["up", "its tokens are pushed up"];
  return advantage < 0 ? ["down", "its tokens are pushed down"] : ["", "its tokens are not pushed"];
}

function arrow(advantage) {
  if (advantage === 0) return "•";
  return advantage > 0 ? "▲" : "▼";
}

/** The credit of a call, in chips. */
export function CreditLine({ call }) {
  return html`<span class="row credit">
    <${CreditChip} call=${call} />
    ${call.rewards.map((reward, at) => html`<${RewardChip} key=${at} reward=${reward} />`)}
    ${call.left_out && !call.replays && html`<span class="soft">${visible(call.left_out)}</span>`}
  </span>`;
}

function RewardChip({ reward }) {
  const value = reward.source === "air" ? signed(reward.value) : figure(reward.value);
  return html`<${Chip} title=${SOURCES[reward.source] ?? reward.source}>${visible(reward.name)} ${value}<//>`;
}
