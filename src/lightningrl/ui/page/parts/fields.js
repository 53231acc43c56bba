// What is in a JSON value that a task or an agent gave? Its fields, one a line, long ones folded.
import { html } from "../vendor/preact.js";
import { Folded, Value, visible, written } from "./plain.js";

const SHORT = 200; // characters of a field that are shown at first
const LINES = 4;

export function Fields({ value }) {
  if (value === null || value === undefined) return html`<p class="soft">nothing</p>`;
  if (typeof value !== "object" || Array.isArray(value)) return html`<${Value} value=${value} />`;
  const entries = Object.entries(value).map(([name, given]) => [name, typeof given === "string" ? given : written(given), typeof given !== "string"]);
  entries.sort((one, other) => (one[1].length > SHORT) - (other[1].length > SHORT)); // long ones last
  if (entries.length === 0) return html`<p class="soft">nothing</p>`;
  return html`<dl class="fields">
    ${entries.map(([name, text, mono]) => html`<div key=${name}><dt>${visible(name)}</dt><dd><${Folded} text=${text} lines=${LINES} characters=${SHORT} mono=${mono} /></dd></div>`)}
  </dl>`;
}
