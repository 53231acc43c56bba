// What is shown where there is nothing yet: why, and what to do.
import { html } from "../vendor/preact.js";

export function Empty({ title, children }) {
  return html`<section class="empty"><h2>${title}</h2><p>${children}</p></section>`;
}

/** While the first answer is on its way: nothing for a moment, so that fast answers do not flicker. */
export function Loading() {
  return html`<p class="loading soft" role="status">Loading…</p>`;
}
