// What happened in one rollout?
import { html } from "../vendor/preact.js";
import { Empty } from "../parts/empty.js";

export default function Rollout() {
  return html`<${Empty} title="This view is not written yet">${null}<//>`;
}
