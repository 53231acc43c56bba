// Which rollouts were there, and which went wrong?
import { html } from "../vendor/preact.js";
import { Empty } from "../parts/empty.js";

export default function Rollouts() {
  return html`<${Empty} title="This view is not written yet">${null}<//>`;
}
