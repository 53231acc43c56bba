// Which rollouts of an exported page can be read call by call?
import { html } from "../vendor/preact.js";
import { link, whole } from "../api.js";

const NAMES = ["best", "worst", "median"];

/** They are of the last training step, in the order of `ui/export.py`. */
export function Whole({ run }) {
  if (whole.length === 0) return null;
  return html`<p class="whole">In full, with every call: ${whole.map(
    (id, at) => html`${at > 0 && ", "}<a key=${id} href=${link(run, "rollout", id)}>${whole.length > 1 ? `the ${NAMES[at]} rollout` : "one rollout"}</a> <span class="soft">${id}</span>`,
  )}. <span class="soft">Other rollouts of their groups are here without their calls. <code>lightningrl ui RUN_DIR</code> shows the whole run.</span></p>`;
}
