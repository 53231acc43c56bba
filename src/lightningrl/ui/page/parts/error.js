// What went wrong, and what to do about it.
import { html } from "../vendor/preact.js";

/** `error`: an `ApiError` with a hint, or any other. */
export function ErrorBox({ error, title = "That did not work" }) {
  return html`<section class="error" role="alert">
    <h2>${title}</h2>
    <p><${Words} text=${error.message} /></p>
    ${error.hint && html`<p><strong>Hint:</strong> <${Words} text=${error.hint} /></p>`}
  </section>`;
}

/** Plain text in which `backticks` mark code. */
export function Words({ text }) {
  return text.split("`").map((part, at) => (at % 2 ? html`<code>${part}</code>` : part));
}
