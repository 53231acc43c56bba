// Who runs what, since when, and what failed?
import { html } from "../vendor/preact.js";
import { Empty } from "../parts/empty.js";

export default function Workers() {
  return html`<${Empty} title="This view is not written yet">${null}<//>`;
}
