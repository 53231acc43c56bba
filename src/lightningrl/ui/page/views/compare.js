// How do runs differ, in what they reached and in their settings?
import { html } from "../vendor/preact.js";
import { Empty } from "../parts/empty.js";

export default function Compare() {
  return html`<${Empty} title="This view is not written yet">${null}<//>`;
}
