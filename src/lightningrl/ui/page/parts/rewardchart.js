// The curve that matters most: reward on tasks that are trained on, and on held-out tasks that are not.
import { html, useMemo } from "../vendor/preact.js";
import { Advice } from "./advice.js";
import { reward } from "./figures.js";
import { Legend, Plot } from "./plot.js";

export function RewardChart({ run, journal, cursor, advice }) {
  const { x, lines } = useMemo(() => rewardLines(journal), [journal]);
  const range = run.settings?.agent?.reward_range;
  const tip = "Held-out tasks are never trained on: their reward shows whether the policy learns. Sampled: as in training; greedy: always the likeliest token. Bands are 95 % intervals.";
  return html`<section class=${`card chart ${advice.some(({ warning }) => warning) ? "warned" : ""}`} id="chart-reward" aria-label="Reward">
    <h2>Reward <span class="unit">mean of a rollout</span></h2>
    <p class="tip">${tip}</p>
    <${Legend} lines=${lines} x=${x} step=${cursor.step} write=${reward} />
    <${Plot} title="Reward" unit="mean of a rollout" axisTitle="reward" range=${range} height=${280} ...${cursor} x=${x} lines=${lines} />
    ${advice.map((each) => html`<${Advice} key=${each.text} ...${each} />`)}
  </section>`;
}

/** {x, lines}: the steps at which anything was measured; training reward at the step, held-out reward after the step. */
export function rewardLines({ rows, intervals }) {
  const exams = (mode) => new Map(rows.filter((row) => row.kind === "exam" && row.mode === mode).map((row) => [row.step, row]));
  const train = new Map(rows.filter(({ kind }) => kind === "step").map((row) => [row.step + 1, row]));
  const [sampled, greedy] = [exams("sampled"), exams("greedy")];
  const x = [...new Set([...train.keys(), ...sampled.keys(), ...greedy.keys()])].sort((a, b) => a - b);
  const column = (of, name) => x.map((step) => of.get(step)?.[name] ?? null);
  const spread = (side) => x.map((step) => intervals[String(step - 1)]?.[side] ?? null);
  const found = [
    { label: "held-out tasks, sampled", style: 1, points: true, values: column(sampled, "reward/mean"), low: column(sampled, "reward/low"), high: column(sampled, "reward/high") },
    { label: "held-out tasks, greedy", style: 3, points: true, values: column(greedy, "reward/mean"), low: column(greedy, "reward/low"), high: column(greedy, "reward/high") },
    { label: "training tasks", style: 2, values: column(train, "reward/mean"), low: spread(0), high: spread(1) },
  ];
  const lines = found.filter(({ values }) => values.some((value) => value !== null));
  return { x, lines: lines.map((line) => (line.low.some((value) => value !== null) ? line : { ...line, low: undefined, high: undefined })) };
}
