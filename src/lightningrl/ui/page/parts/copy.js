// A button that puts text on the clipboard and says so.
import { html, useState } from "../vendor/preact.js";

export function Copy({ text, label = "Copy" }) {
  const [said, setSaid] = useState(null);
  async function copy() {
    const done = await navigator.clipboard.writeText(text).then(() => "Copied", () => "Not allowed here");
    setSaid(done);
    setTimeout(() => setSaid(null), 1500);
  }
  return html`<button class="small" onClick=${copy}><span aria-live="polite">${said ?? label}</span></button>`;
}
