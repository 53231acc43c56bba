// Where does a rollout part from the one that it repeats, and how did its siblings do? Branches in words, with links.
import { html } from "../vendor/preact.js";
import { link } from "../api.js";
import { placesOf } from "./branching.js";
import { counted } from "./digits.js";
import { figure } from "./figures.js";
import { visible } from "./plain.js";

/** `siblings`: [{rollout, reward, status}] as links; the rollout that is shown is none. */
function Answers({ run, answers, rollout }) {
  return answers.map(
    (answer, at) => html`${at > 0 && ", "}${answer.rollout === rollout
      ? html`<strong title="this rollout">▸${ending(answer)}◂</strong>`
      : html`<a href=${link(run, "rollout", answer.rollout)} title=${answer.rollout}>${ending(answer)}</a>`}`,
  );
}

function ending({ reward, status }) {
  return reward === null ? status : figure(reward);
}

/** What a branch repeats, and what the other answers to its branching call earned. Two sentences. */
export function BranchWords({ run, branch, rollout }) {
  const { rollout: trunk, attempt, call, is_replay: replay, answers } = branch;
  const name = trunk === null ? html`attempt ${visible(attempt)}, which is not recorded here` : html`<a href=${link(run, "rollout", trunk)}>${visible(trunk)}</a>`;
  if (replay) return html`<strong>A replay of</strong> ${name}: all answers are played back from its record.`;
  const place = call !== null && html` at <a href=${link(run, "rollout", trunk, "call", call)}>call ${call}</a>`;
  return html`<strong>A branch of</strong> ${name}${place}: what came before is played back, and the rest is its own.
    ${answers.length > 0 && html` Rewards of the ${counted(answers.length, "answer")} to that call: <${Answers} run=${run} answers=${answers} rollout=${rollout} />.`}`;
}

/** Where a rollout was branched, and what the branches earned. */
export function Branched({ run, branches, rollout }) {
  return html`<strong>Branched</strong> ${placesOf(branches).map(
    ({ call, branches: there }, at) => html`${at > 0 && "; "}${call === null ? "nowhere, as " : html`at <a href=${link(run, "rollout", rollout, "call", call)}>call ${call}</a>: `}${named(there.length, call)}, rewards <${Answers} run=${run} answers=${there} />`,
  )}.`;
}

function named(number, call) {
  if (call === null) return `${counted(number, "replay")} of all its calls`;
  return number === 1 ? "1 branch" : `${number} branches`;
}

/** Why a branch teaches nothing. The example may be long, and an agent wrote it. */
export function Void({ branch }) {
  return html`<strong class="bad">Void:</strong> its agent went another way than the recorded attempt, so it has no reward, and its group does not count it. ${capital(visible(branch.void))}.`;
}

function capital(text) {
  return typeof text === "string" ? text[0].toUpperCase() + text.slice(1) : text;
}
