// The run in a few figures: did it learn, how far is it, how many rollouts, and how to continue it.
import { html } from "../vendor/preact.js";
import { link } from "../api.js";
import { Copy } from "./copy.js";
import { ErrorBox } from "./error.js";
import { duration, reward } from "./figures.js";
import { Ago, Time } from "./time.js";

export function Summary({ run, journal }) {
  return html`<section aria-label="Summary">
    <h1>${run.run}</h1>
    <dl class="tiles">
      <${Learnt} run=${run} journal=${journal} />
      <${Steps} run=${run} journal=${journal} />
      <${Rollouts} run=${run} />
      <${Tile} name="Began"><${Time} at=${run.began_at} /><${Tile.Sub}>${run.state === "running" ? html`changed <${Ago} at=${run.changed_at} />` : html`<span title="Without the time from a stop to a resumption">took ${duration(run.seconds)}</span>`}<//><//>
    </dl>
    ${run.error && html`<${ErrorBox} error=${{ message: run.error }} title="The records of this run cannot be read" />`}
    ${run.state === "stopped" && run.resume_command && html`<${Resume} command=${run.resume_command} />`}
  </section>`;
}

function Tile({ name, title, children }) {
  return html`<div class="tile" title=${title}><dt>${name}</dt><dd>${children}</dd></div>`;
}
Tile.Sub = function Sub({ children }) {
  return html`<div class="sub">${children}</div>`;
};

const VERDICTS = {
  yes: ["good", "It learnt", "The gain on held-out tasks is more than chance"],
  no: ["", "No gain beyond chance", "The change on held-out tasks may be chance"],
  worse: ["bad", "It became worse", "The loss on held-out tasks is more than chance"],
};

/** Held-out reward from → to, and what that means. */
function Learnt({ run, journal }) {
  const { before, latest, low, high, learnt } = run.heldout;
  if (latest === null) return html`<${Tile} name="Held-out reward"><span class="soft">not measured yet</span><//>`;
  const trained = journal.rows.some(({ kind, mode, step }) => kind === "exam" && mode === "sampled" && step > 0);
  if (!trained && run.state !== "complete") return html`<${Tile} name="Held-out reward" title="Mean reward on tasks that are never trained on"><span class="big">${reward(latest)}</span><${Tile.Sub}>before training<//><//>`;
  const [tone, words, meaning] = VERDICTS[learnt] ?? ["", run.state === "complete" ? "" : "so far", ""];
  const change = before === null ? null : latest - before;
  const sure = run.result?.heldout_change;
  return html`<${Tile} name="Held-out reward" title="Mean reward on tasks that are never trained on: before → latest">
    <span class="big">${before !== null && html`<span class="soft">${reward(before)} → </span>`}<span title=${low === null ? "" : `95 % interval: ${reward(low)} to ${reward(high)}`}>${reward(latest)}</span></span>
    <${Tile.Sub}>
      ${learnt && html`<strong class=${tone} title=${meaning}>${words}</strong>`} ${change !== null && html`<span>${signed(change)}${!learnt && ` ${words}`}</span>`}
      ${sure && html` <span title="95 % interval of the change">(${signed(sure.low)} to ${signed(sure.high)})</span>`}
    <//>
  <//>`;
}

function signed(value) {
  return `${value > 0 ? "+" : ""}${reward(value)}`;
}

function Steps({ run, journal }) {
  if (run.steps === null) return null;
  const rewards = journal.rows.filter(({ kind }) => kind === "step").map((row) => row["reward/mean"]);
  return html`<${Tile} name="Steps">
    <span class="big">${run.step}<span class="soft"> of ${run.steps}</span></span>
    <progress value=${run.step} max=${run.steps} aria-label="Steps done"></progress>
    ${rewards.length > 0 && html`<${Tile.Sub}>training reward ${reward(rewards[0])} → ${reward(rewards.at(-1))}<//>`}
  <//>`;
}

function Rollouts({ run }) {
  const counts = Object.entries(run.counts ?? {}).filter(([, number]) => number > 0);
  return html`<${Tile} name="Rollouts" title="Each is one execution of the agent on a task">
    <a class="big" href=${link(run.run, "rollouts")}>${run.rollouts === null ? "–" : run.rollouts.toLocaleString("en")}</a>
    <${Tile.Sub}>
      ${counts.map(([status, number], at) => html`${at > 0 && ", "}<a key=${status} href=${link(run.run, "rollouts", { status })}>${number.toLocaleString("en")} ${status}</a>`)}
    <//>
  <//>`;
}

function Resume({ command }) {
  return html`<p class="row resume">This run stopped before its last step. Continue it with <code>${command}</code> <${Copy} text=${command} /></p>`;
}
