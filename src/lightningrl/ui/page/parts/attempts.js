// How often was the rollout tried, by whom, with which error, and what did the attempt print?
import { html } from "../vendor/preact.js";
import { link } from "../api.js";
import { duration } from "./figures.js";
import { Folded, visible } from "./plain.js";
import { Status } from "./status.js";
import { Time } from "./time.js";

export function Attempts({ run, rollout, attempts, shown, logs }) {
  if (attempts.length === 0) return html`<section><h2>Attempts</h2><p class="soft">None has begun: the rollout waits in the queue.</p></section>`;
  return html`<section class="attempts">
    <h2>${attempts.length === 1 ? "The attempt" : `${attempts.length} attempts`}</h2>
    ${attempts.map((attempt) => html`<${Attempt} key=${attempt.id} run=${run} rollout=${rollout} attempt=${attempt} shown=${attempt.id === shown?.id} />`)}
    ${logs && html`<details class="raw" open=${Boolean(shown?.error)}><summary>What it printed${logs.truncated ? " (the end of it)" : ""}</summary><${Folded} text=${logs.text} mono lines=${40} characters=${8000} /></details>`}
    ${!logs && shown?.worker && shown.worker !== "local" && html`<p class="soft">What it printed is in the agents.log of worker ${visible(shown.worker)}, on its machine.</p>`}
  </section>`;
}

function Attempt({ run, rollout, attempt, shown }) {
  const lasted = attempt.ended_at ? `, ${duration(attempt.ended_at - attempt.started_at)}` : "";
  return html`<div class=${`attempt ${shown ? "shown" : ""}`}>
    <div class="row">
      ${shown ? html`<strong>attempt ${attempt.number}</strong>` : html`<a href=${link(run, "rollout", rollout, { attempt: attempt.number })}>attempt ${attempt.number}</a>`}
      <${Status} status=${attempt.status} />
      <span class="soft">by worker ${visible(attempt.worker || "unknown")}, <${Time} at=${attempt.started_at} />${lasted}${shown ? " · shown on this page" : ""}</span>
    </div>
    ${attempt.error && html`<${Trace} error=${attempt.error} />`}
  </div>`;
}

/** The first line of an error, and its trace folded. */
function Trace({ error }) {
  const [first, ...rest] = error.split("\n");
  return html`<p class="bad">${visible(first)}</p>
    ${rest.length > 0 && html`<details><summary>where it was raised</summary><${Folded} text=${rest.join("\n")} mono lines=${60} characters=${6000} /></details>`}`;
}
