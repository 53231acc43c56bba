// A warning or a note of `lightningrl health`: what is the matter, and what to do.
import { html } from "../vendor/preact.js";
import { Words } from "./error.js";

export function Advice({ text, hint, warning, link }) {
  return html`<div class=${`advice ${warning ? "warn" : ""}`}>
    <p><strong>${warning ? "Warning" : "Note"}:</strong> <${Words} text=${text} /> ${link}</p>
    ${hint && html`<p><strong>Hint:</strong> <${Words} text=${hint} /></p>`}
  </div>`;
}
