// Which curves are there, what do they mean, and how are they computed from the metrics of a step?

const CAPTURES = ["bridged", "partly", "rendered", "forked", "upstream", "incomplete"];
const OF_THE_RECIPE = new Set(["policy", "agent"]); // reasons for leaving tokens out that follow from the recipe
const calls = (at) => sum(CAPTURES.map((capture) => at(`calls/${capture}`)));

/**
 * {title, unit, tip, lines: [{metric, label, value}]}. A line is there if the run has its `metric`, once for each
 * policy that has its own; `value(at)` computes it, where `at(name)` is a metric of that policy; otherwise it is the
 * metric itself. `share`: shown in percent. `zero`: the axis begins at 0. `words`: one sentence for newcomers.
 */
const chart = (title, unit, tip, lines, more = {}) => ({ title, unit, tip, lines, ...more });
const line = (metric, label = "", value = (at) => at(metric)) => ({ metric, label, value });
const SHARE = { share: true, zero: true };

export const SECTIONS = [
  {
    title: "Rewards and groups",
    charts: [
      chart("Spread of rewards in a group", "reward", "Mean standard deviation of the rewards of one task's rollouts. At 0 there is nothing to compare, and nothing is learnt.", [line("reward/std_in_group")], { zero: true }),
      chart("Groups that teach nothing", "% of groups", "All rollouts of the group got the same reward, so that none is better than the others.", [line("groups/silent", "", (at) => at("groups/silent") / at("groups/count"))], SHARE),
      chart("Rollouts that failed", "% of rollouts", "Rollouts without an accepted attempt. They are left out; they do not count as reward 0.", [line("rollouts/excluded", "", (at) => at("rollouts/excluded") / (at("rollouts/excluded") + at("rollouts/succeeded")))], SHARE),
      chart("Branches that are void", "% of branches", "Their agents went another way than recorded. They are left out of their groups, like rollouts that failed.", [line("forks/void", "", (at) => at("forks/void") / at("forks/branches"))], SHARE),
    ],
  },
  {
    title: "What the policy does",
    charts: [
      chart("Entropy", "nats a token", "How undecided the policy is. Near 0 it always says the same and no longer explores.", [line("policy/entropy")], { zero: true }),
      chart("Calls of a rollout", "calls", "How often the agent asks the model in one rollout.", [line("calls/per_rollout")], { zero: true }),
      chart("Length of an answer", "tokens a call", "Tokens that the model samples in one call.", [line("tokens/per_call")], { zero: true }),
      chart("Calls cut off", "% of calls", "Calls that reached their token limit.", [line("calls/truncated", "", (at) => at("calls/truncated") / calls(at))], SHARE),
    ],
  },
  {
    title: "How far a step moves the policy",
    charts: [
      chart("KL, trainer from engine", "nats a token", "How far the weights moved within the step, away from those that sampled.", [line("policy/kl_engine")], { zero: true }),
      chart("KL from the start", "nats a token", "How far the policy is from its first weights.", [line("loss/kl")], { zero: true }),
      chart("Ratio, mean", "", "How much likelier the sampled tokens became within a step, on average. It should stay near 1.", [line("loss/ratio_mean")], { digits: 6 }),
      chart("Ratio, largest", "", "The token that became likelier by the largest factor.", [line("loss/ratio_max")]),
      chart("Tokens clipped", "% of tokens", "Tokens whose ratio left the trust region, so that they no longer push.", [line("loss/clip_fraction")], SHARE),
      chart("Gradient norm", "", "Size of the gradient before it is clipped.", [line("optim/grad_norm")], { zero: true }),
      chart("Learning rate", "", "Set by trainer.learning_rate and trainer.schedule.", [line("optim/learning_rate")], { zero: true }),
      chart("Loss", "", "The loss that is minimised. With these algorithms it says little: watch the reward.", [line("loss/value")]),
      chart("Largest gap of logprobs", "nats", "Largest difference between engine and trainer for the same token and the same weights. It should be rounding only.", [line("policy/logprob_gap")], { zero: true }),
      chart("Tokens beyond the cap", "% of tokens", "Tokens whose importance weight is capped.", [line("loss/importance_capped")], SHARE),
      chart("Updates skipped", "% of updates", "Updates left out because a loss or a gradient was not finite.", [line("optim/skipped")], SHARE),
    ],
  },
  {
    title: "Advantages and critic",
    charts: [
      chart("Advantage, mean", "", "Mean over the sampled tokens; above 0 they become likelier.", [line("advantage/mean")]),
      chart("Advantage, deviation", "", "Standard deviation over the sampled tokens.", [line("advantage/std")], { zero: true }),
      chart("Advantage, largest", "", "", [line("advantage/max")], { zero: true }),
      chart("Tokens that become likelier", "% of tokens", "Sampled tokens with a positive advantage.", [line("advantage/positive_share")], SHARE),
      chart("Variance the critic explains", "% of variance", "How well the critic predicts the returns.", [line("critic/explained_variance")], { share: true }),
    ],
  },
  {
    title: "Calls and tokens",
    charts: [
      chart("How prompts came about", "calls", "bridged: continues an earlier call token by token. rendered: a fresh start. forked, partly: the agent rewrote its history.", CAPTURES.map((name) => line(`calls/${name}`, name)), { zero: true, hideZeros: true }),
      chart("Tokens sampled", "tokens", "All tokens that the model sampled in the step.", [line("tokens/sampled")], { zero: true }),
      chart("Tokens trained", "tokens", "Sampled tokens that the policy learnt from.", [line("tokens/trained")], { zero: true }),
      chart("Tokens computed", "tokens", "Tokens that the trainer computed; shared prefixes are computed once.", [line("tokens/computed")], { zero: true }),
    ],
  },
  {
    title: "Time and CPU",
    charts: [
      chart("Time of a step", "s", "collect: agents run. learn: the weights are updated.", [line("time/collect_s", "collect"), line("time/learn_s", "learn"), line("time/measure_s", "measure")], { zero: true }),
      chart("CPU time of a step", "CPU s", "Seconds of one core, by part of the run.", ["agents", "gateway", "engine", "training", "rest"].map((part) => line(`cpu/${part}_s`, part)), { zero: true }),
    ],
  },
];

/** The sections that this run has something for: each chart with its `id` and drawn lines {label, policy, values}. */
export function chartsOf(rows, policies) {
  const names = new Set(rows.flatMap((row) => Object.keys(row).filter((name) => name.includes("/"))));
  const used = new Set(["reward/mean", "reward/final"]);
  const sections = [...SECTIONS.map((section, at) => (at === 0 ? withRewards(section, names) : section)).map((section) => withLeftOut(section, names))];
  const drawn = sections.map(({ title, charts }) => ({ title, charts: charts.map((each) => drawnChart(each, rows, policies, names, used)).filter(Boolean) }));
  const rest = [...new Set([...names].map((name) => ownName(name, policies)))].filter((name) => !used.has(name)).sort();
  const others = rest.map((name) => drawnChart(chart(name, "", "", [line(name)]), rows, policies, names, used)).filter(Boolean);
  const all = [...drawn, { title: "All other metrics", charts: others, folded: true }];
  return all.map(withoutZeros).filter(({ charts, zeros }) => charts.length + zeros.length > 0);
}

/** Shares that were always 0 are named in one line, and not drawn. */
function withoutZeros(section) {
  const zero = ({ share, lines }) => share && lines.every(({ values }) => values.every((value) => !value));
  return { ...section, charts: section.charts.filter((each) => !zero(each)), zeros: section.charts.filter(zero) };
}

/** The place of a metric's curve in the page, for links to it. */
export function anchorOf(sections, metric, policies) {
  const own = ownName(metric, policies);
  if (own === "reward/mean" || own === "reward/final") return "chart-reward";
  return sections.flatMap(({ charts }) => charts).find(({ metrics }) => metrics.includes(own))?.id ?? null;
}

export function ownName(metric, policies) {
  const policy = policies.find((name) => metric.startsWith(`${name}/`) && metric.split("/").length > 2);
  return policy === undefined ? metric : metric.slice(policy.length + 1);
}

/** Rewards that graders and rules of a recipe name; unknown before the run. */
function withRewards(section, names) {
  const named = [...names].filter((name) => /^reward\/(?!mean$|final$|std_in_group$)/.test(name)).sort();
  if (named.length === 0) return section;
  const lines = named.map((name) => line(name, name.slice("reward/".length)));
  const tip = "Mean of each named reward. Which one is trained is set by algorithm.reward.";
  return { ...section, charts: [chart("Named rewards", "reward", tip, lines), ...section.charts] };
}

/** Reasons for leaving tokens out; only those that happened. */
function withLeftOut(section, names) {
  if (section.title !== "Calls and tokens") return section;
  const prefix = "tokens/left_out_";
  const reasons = [...new Set([...names].filter((name) => name.includes(prefix)).map((name) => name.split(prefix)[1]))].filter((reason) => !OF_THE_RECIPE.has(reason)).sort();
  if (reasons.length === 0) return section;
  const wanted = (at) => sum(reasons.map((reason) => at(prefix + reason))) + (at("tokens/selected") ?? 0);
  const lines = reasons.map((reason) => line(prefix + reason, reason, (at) => (at(prefix + reason) ?? 0) / wanted(at)));
  return { ...section, charts: [...section.charts, chart("Tokens left out, by reason", "% of tokens", "Tokens that the policy should learn from, and did not.", lines, SHARE)] };
}

function drawnChart(spec, rows, policies, names, used) {
  const lines = spec.lines.flatMap(({ metric, label, value }) => {
    used.add(metric);
    const owners = policies.filter((policy) => names.has(`${policy}/${metric}`));
    if (owners.length === 0 && names.has(metric)) return [{ label, policy: null, values: rows.map((row) => valueIn(row, null, value)) }];
    const own = owners.map((policy) => ({ label: [policy, label].filter(Boolean).join(": "), policy, values: rows.map((row) => valueIn(row, policy, value)) }));
    return alike(own) ? [{ label: ["all policies", label].filter(Boolean).join(": "), policy: null, values: own[0].values }] : own;
  });
  const shown = spec.hideZeros ? lines.filter(({ values }) => values.some((value) => value)) : lines;
  if (!shown.some(({ values }) => values.some((value) => value !== null))) return null;
  const metrics = spec.lines.map(({ metric }) => metric);
  return { ...spec, id: `chart-${spec.title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`, metrics, lines: shown };
}

/** Policies that share the rewards of a rollout have curves that lie on each other: one line says so better. */
function alike(lines) {
  return lines.length > 1 && new Set(lines.map(({ values }) => JSON.stringify(values))).size === 1;
}

function valueIn(row, policy, value) {
  const found = value((name) => (policy === null ? row[name] : (row[`${policy}/${name}`] ?? row[name])));
  return typeof found === "number" && Number.isFinite(found) ? found : null;
}

function sum(values) {
  return values.reduce((total, value) => total + (value ?? 0), 0);
}
