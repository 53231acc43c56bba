// With which settings does the run train?
import { html } from "../vendor/preact.js";
import { Empty } from "../parts/empty.js";

export default function Settings() {
  return html`<${Empty} title="This view is not written yet">${null}<//>`;
}
