// A word with a colour: the state of a run or a rollout.
import { html } from "../vendor/preact.js";

/** `tone`: "good", "bad", "warn", "live" or none. */
export function Chip({ tone = "", title, children }) {
  return html`<span class=${`chip ${tone}`} title=${title}>${children}</span>`;
}

const RUNS = {
  running: ["live", "The run's process is alive"],
  complete: ["good", "The run has done all of its steps"],
  stopped: ["warn", "The run's process ended before the last step; it can be resumed"],
};

export function StateChip({ state }) {
  const [tone, title] = RUNS[state] ?? ["", state];
  return html`<${Chip} tone=${tone} title=${title}>${state}<//>`;
}

const ROLLOUTS = { succeeded: "good", failed: "bad", running: "live", timeout: "bad", cancelled: "warn" };

export function StatusChip({ status }) {
  return html`<${Chip} tone=${ROLLOUTS[status] ?? ""}>${status}<//>`;
}
