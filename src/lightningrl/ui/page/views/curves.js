// Is it learning, and is the learning signal healthy?
import { html } from "../vendor/preact.js";
import { Empty } from "../parts/empty.js";

export default function Curves() {
  return html`<${Empty} title="This view is not written yet">${null}<//>`;
}
