// How did a rollout or an attempt end? "succeeded" is no praise: the reward says how well it did.
import { html } from "../vendor/preact.js";
import { StatusChip } from "./chip.js";

export function Status({ status }) {
  if (status !== "succeeded") return html`<${StatusChip} status=${status} />`;
  return html`<span class="soft" title="The agent ended without an error; the reward says how well it did">succeeded</span>`;
}
