// What did the rollouts of one task do differently, and what did each way earn?
import { html } from "../vendor/preact.js";
import { link, navigate, useApi } from "../api.js";
import { useKeys } from "../keys.js";
import { Branches, Trunk } from "../parts/branches.js";
import { branchesOf } from "../parts/branching.js";
import { counted } from "../parts/digits.js";
import { Empty, Loading } from "../parts/empty.js";
import { ErrorBox } from "../parts/error.js";
import { Fields } from "../parts/fields.js";
import { figure } from "../parts/figures.js";
import { Ladder } from "../parts/ladder.js";
import { visible } from "../parts/plain.js";

export default function GroupView({ route }) {
  const { run, group } = route;
  const path = `/api/runs/${encodeURIComponent(run)}/groups/${encodeURIComponent(group)}`;
  const { data, error, path: whose } = useApi(path, { live: "rollouts" });
  const stale = whose !== path; // the data of another group, until this one's has arrived
  useKeys([
    ["j", "next rollout", () => focusMember(1)],
    ["k", "rollout before", () => focusMember(-1)],
    ["Enter", "open the rollout", () => false],
    ["a", "all rollouts of this step", () => !stale && data?.step && navigate(link(run, "rollouts", { step: data.step }))],
  ]);
  if (error && (!data || stale)) return html`<${ErrorBox} error=${error} title="This group cannot be shown" />`;
  if (!data) return html`<${Loading} />`;
  return html`<div class=${`stack ${stale ? "stale" : ""}`}>
    <header>
      <h1>${rolloutsAndBranches(data.members)} of one task</h1>
      <p class="soft">Group ${visible(data.group)}${data.step === null ? "" : html` · <a href=${link(run, "rollouts", { step: data.step })}>step ${data.step}</a>`} · task ${visible(data.task.id)}</p>
    </header>
    <section>
      <p>${lesson(data)}</p>
      <${Ladder} run=${run} group=${data.group} members=${data.members} mean=${data.mean} />
    </section>
    <details class="card"><summary><strong>The task</strong></summary><${Fields} value=${data.task.input} /></details>
    <${Parting} run=${run} data=${data} />
  </div>`;
}

function rolloutsAndBranches(members) {
  const branches = members.filter(({ trunk }) => trunk !== null).length;
  const rollouts = counted(members.length - branches, "rollout");
  if (branches === 0) return rollouts;
  return `${rollouts} and ${branches === 1 ? "one branch" : `${branches} branches`}`;
}

function focusMember(by) {
  const links = [...document.querySelectorAll(".ladder a")];
  const at = links.indexOf(document.activeElement);
  const next = links[at < 0 ? 0 : at + by];
  next?.focus();
  return next !== undefined;
}

/** What the group teaches, in two sentences. */
function lesson({ members, mean, std }) {
  const branched = members.some(({ trunk }) => trunk !== null);
  const known = members.filter((member) => member.reward !== null);
  if (members.length === 1) return "Only one rollout tried this task, so there is nothing to compare.";
  if (known.length === 0) return "None of them has a reward yet.";
  if (std !== null && std < 1e-9 && !branched) return `All have the reward ${figure(mean)}. Equal rewards teach nothing: none did better than the others.`;
  const spread = std === null ? "" : ` (standard deviation ${figure(std)})`;
  const words = `Their mean reward${branched ? ", without branches," : ""} is ${figure(mean)}${spread}.`;
  if (!isRelative(members, mean)) return `${words} ▲ is pushed up by training, ▼ down; beside it is the mean advantage over the tokens of the rollout.`;
  return `${words} What did better than the mean is pushed up (▲), what did worse down (▼). The figure beside an arrow is the mean advantage over the tokens of the rollout.`;
}

/** Whether each advantage has the sign of the distance to the mean; not all algorithms compare within the group. */
function isRelative(members, mean) {
  const known = members.filter(({ advantage, reward }) => advantage !== null && reward !== null);
  return known.length > 0 && known.every(({ advantage, reward }) => Math.sign(advantage) === Math.sign(reward - mean));
}

function Parting({ run, data }) {
  if (data.nodes.length === 0) return html`<${Empty} title="No calls yet">The rollouts have not called the model.<//>`;
  const ways = branchesOf(data.nodes).length;
  return html`<section>
    <h2>Where they part</h2>
    ${data.nodes.some((node) => node.siblings.length > 0) && html`<p class="soft">Where a rollout was branched, its answer and those of its branches are <em>siblings</em>: they read the same. Above such a place, the figure is the mean of what the siblings got.</p>`}
    <p class="soft">All began with these messages. ${ways === 1 ? "Their first answer is the same." : `Then they parted into ${ways} ways, best first.`} Equal answers lie together; what they share is dim.</p>
    <details class="card" open=${data.trunk.length < 3}><summary><strong>What all of them read first</strong> <span class="soft">${counted(data.trunk.length, "message")}</span></summary><${Trunk} messages=${data.trunk} /></details>
    <${Branches} run=${run} data=${data} />
  </section>`;
}
