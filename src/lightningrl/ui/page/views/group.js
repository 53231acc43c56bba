// Where do the rollouts of one task part, and what did each branch earn?
import { html } from "../vendor/preact.js";
import { Empty } from "../parts/empty.js";

export default function Group() {
  return html`<${Empty} title="This view is not written yet">${null}<//>`;
}
