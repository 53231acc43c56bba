// A JSON value that can be folded: what an agent sent, a result, settings. Everything is text.
import { html } from "../vendor/preact.js";
import { visible } from "./plain.js";

/** `open`: how many levels are unfolded at first. */
export function Json({ value, name, open = 1 }) {
  const label = name === undefined ? null : html`<span class="json-name">${visible(String(name))}: </span>`;
  if (value === null || typeof value !== "object") {
    return html`<div class="json">${label}<span class=${`json-${value === null ? "null" : typeof value}`}>${visible(JSON.stringify(value))}</span></div>`;
  }
  const entries = Object.entries(value);
  const list = Array.isArray(value);
  if (entries.length === 0) return html`<div class="json">${label}${list ? "[]" : "{}"}</div>`;
  const size = list ? `[${entries.length}]` : `{${entries.length}}`;
  return html`<details class="json" open=${open > 0}>
    <summary>${label}<span class="soft">${size}</span></summary>
    ${entries.map(([key, part]) => html`<${Json} key=${key} name=${key} value=${part} open=${open - 1} />`)}
  </details>`;
}
