// What have I run, and how did it end?
import { html } from "../vendor/preact.js";
import { Empty } from "../parts/empty.js";

export default function Runs() {
  return html`<${Empty} title="This view is not written yet">${null}<//>`;
}
