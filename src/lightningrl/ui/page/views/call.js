// What did the model read and answer in one call, token by token?
import { html } from "../vendor/preact.js";
import { Empty } from "../parts/empty.js";

export default function Call() {
  return html`<${Empty} title="This view is not written yet">${null}<//>`;
}
