// How do runs differ, in what they reached and in their settings?
import { html, useEffect, useMemo, useState } from "../vendor/preact.js";
import { decoded, get, link } from "../api.js";
import { chartsOf } from "../charts.js";
import { useKeys } from "../keys.js";
import { useManyMetrics } from "../metrics.js";
import { StateChip } from "../parts/chip.js";
import { Empty, Loading } from "../parts/empty.js";
import { ErrorBox } from "../parts/error.js";
import { reward } from "../parts/figures.js";
import { Legend, Plot } from "../parts/plot.js";
import { rewardLines } from "../parts/rewardchart.js";
import { flat, Value } from "../parts/setting.js";

const EVERY_S = 5;
const CHARTS = ["Entropy", "Length of an answer", "Calls of a rollout", "Groups that teach nothing", "KL, trainer from engine", "Tokens clipped", "Gradient norm", "Learning rate"];

export default function Compare({ route }) {
  const names = useMemo(() => (route.query.runs ?? "").split(",").filter(Boolean).map(decoded).slice(0, 8), [route.query.runs]);
  const { runs, error } = useRuns(names);
  const journals = useManyMetrics(names);
  if (names.length === 0) return html`<${Empty} title="Nothing to compare"><a href="#/">Choose two to eight runs</a> in the list.<//>`;
  if (runs === null) return error ? html`<${ErrorBox} error=${error} />` : html`<${Loading} />`;
  return html`<div class="stack">
    ${error && html`<${ErrorBox} error=${error} />`}
    <h1>Compare ${names.length} runs</h1>
    <${Reached} runs=${runs} />
    <${Curves} runs=${runs} journals=${journals} />
    <section><h2>Settings that differ</h2><${Differences} runs=${runs} /></section>
  </div>`;
}

/** {runs, error}: what is known of the runs, asked again every few seconds; while one does not answer, the runs as they were. */
function useRuns(names) {
  const [state, setState] = useState({ runs: null, error: null });
  useEffect(() => {
    let ended = false;
    const ask = async () => {
      const asked = names.map((name) => get(`/api/runs/${encodeURIComponent(name)}`));
      const next = await Promise.all(asked).then((runs) => ({ runs, error: null }), (error) => ({ error }));
      if (!ended) setState((old) => ({ ...old, ...next }));
    };
    setState({ runs: null, error: null });
    ask();
    const timer = setInterval(() => document.hidden || ask(), EVERY_S * 1000);
    return () => {
      ended = true;
      clearInterval(timer);
    };
  }, [names]);
  return state;
}

function Name({ run, at }) {
  return html`<a href=${link(run.run)}><span class="line-mark dots" style=${{ background: `var(--series-${at + 1})`, display: "inline-block" }}></span> ${run.run}</a>`;
}

function Reached({ runs }) {
  return html`<div class="scroll"><table aria-label="What the runs reached">
    <thead><tr><th scope="col">Run</th><th scope="col">Recipe</th><th scope="col">State</th><th scope="col" class="number">Steps</th><th scope="col" class="number">Held-out before</th><th scope="col" class="number">Latest</th><th scope="col" class="number">95 % interval</th></tr></thead>
    <tbody>
      ${runs.map((run, at) => html`<tr key=${run.run}>
        <td><${Name} run=${run} at=${at} /></td><td>${run.recipe ?? "–"}</td><td><${StateChip} state=${run.state} /></td>
        <td class="number">${run.step}<span class="soft"> of ${run.steps ?? "–"}</span></td>
        <td class="number">${reward(run.heldout.before)}</td><td class="number"><strong>${reward(run.heldout.latest)}</strong></td>
        <td class="number">${run.heldout.low === null ? html`<span class="soft">–</span>` : `${reward(run.heldout.low)} to ${reward(run.heldout.high)}`}</td>
      </tr>`)}
    </tbody>
  </table></div>`;
}

function Curves({ runs, journals }) {
  const [step, setStep] = useState(null);
  const charts = useMemo(() => compared(runs, journals), [runs, journals]);
  const last = Math.max(0, ...charts.map(({ x }) => x.at(-1)));
  const move = (by) => () => setStep((old) => Math.min(Math.max((old ?? last + (by < 0 ? 1 : 0)) + by, 0), last));
  useKeys([
    ["ArrowRight", "next step", move(1)],
    ["ArrowLeft", "step before", move(-1)],
    ["Escape", "show the latest step again", () => setStep(null)],
  ]);
  const known = runs.map(({ run }) => journals[run]).filter(Boolean);
  const unread = known.find(({ error }) => error)?.error;
  if (charts.length === 0 && known.length < runs.length) return html`<${Loading} />`;
  if (charts.length === 0 && !unread) return html`<p class="soft">None of these runs has a step yet.</p>`;
  return html`
    ${unread && html`<${ErrorBox} error=${unread} title="Not all curves can be read" />`}
    <p class="readout">${step === null ? html`<span class="soft">Point at a curve to read a step in all of them. Keys: <kbd>←</kbd> <kbd>→</kbd></span>` : html`<strong>Step ${step}</strong>`}</p>
    <div class="charts">
      ${charts.map(
        (chart) => html`<section key=${chart.title} class=${`card chart ${chart.wide ? "wide" : ""}`} aria-label=${chart.title}>
          <h2>${chart.title} ${chart.unit && html`<span class="unit">${chart.unit}</span>`}</h2>
          <p class="tip">${chart.tip}</p>
          <${Legend} lines=${chart.lines} x=${chart.x} step=${step} share=${chart.share} write=${chart.wide ? reward : undefined} />
          <${Plot} ...${chart} height=${chart.wide ? 240 : 140} last=${last} step=${step} onStep=${setStep} />
        </section>`,
      )}
    </div>
  `;
}

/** The same charts as for one run, with one line for each run (and policy). */
function compared(runs, journals) {
  const parts = runs.flatMap((run, at) => (journals[run.run]?.data ? chartsOfRun(run, journals[run.run].data, at) : []));
  const titles = [...new Set(parts.map(({ title }) => title))];
  const order = ["Reward on held-out tasks", "Reward on training tasks", ...CHARTS];
  return titles.sort((a, b) => order.indexOf(a) - order.indexOf(b)).map((title) => joined(parts.filter((part) => part.title === title)));
}

function chartsOfRun(run, journal, at) {
  const rows = journal.rows.filter(({ kind }) => kind === "step");
  const x = rows.map((row) => row.step + 1);
  const reward = rewardLines(journal);
  const rewards = [["held-out tasks, sampled", "Reward on held-out tasks"], ["training tasks", "Reward on training tasks"]].flatMap(([label, title]) => {
    const found = reward.lines.find((line) => line.label === label);
    return found ? [{ title, tip: "Bands are 95 % intervals.", wide: true, range: run.settings?.agent?.reward_range, x: reward.x, lines: [{ ...found, label: run.run, style: at + 1 }] }] : [];
  });
  const others = chartsOf(rows, run.policies).flatMap(({ charts, zeros }) => [...charts, ...zeros]).filter(({ title }) => CHARTS.includes(title));
  const named = (line) => ({ ...line, label: line.policy ? `${run.run}: ${line.policy}` : run.run, style: at + 1, dash: Math.max(0, run.policies.indexOf(line.policy)) });
  return [...rewards, ...others.map((chart) => ({ ...chart, x, lines: chart.lines.map(named) }))];
}

/** Charts of several runs with the same title as one, over all of their steps. */
function joined(parts) {
  const x = [...new Set(parts.flatMap((part) => part.x))].sort((a, b) => a - b);
  const spread = (from, values) => {
    const known = new Map(from.map((step, at) => [step, values[at]]));
    return x.map((step) => known.get(step) ?? null);
  };
  const lines = parts.flatMap((part) => part.lines.map((line) => ({ ...line, values: spread(part.x, line.values), low: line.low && spread(part.x, line.low), high: line.high && spread(part.x, line.high) })));
  return { ...parts[0], x, lines };
}

function Differences({ runs }) {
  const settings = runs.map((run) => flat(run.settings ?? {}));
  const names = [...new Set(settings.flatMap(Object.keys))];
  const different = names.filter((name) => new Set(settings.map((each) => JSON.stringify(each[name]))).size > 1);
  if (different.length === 0) return html`<p class="soft">All settings of these runs are the same.</p>`;
  return html`<div class="scroll"><table class="settings" aria-label="Settings that differ">
    <thead><tr><th scope="col">Setting</th>${runs.map((run, at) => html`<th scope="col" key=${run.run}><${Name} run=${run} at=${at} /></th>`)}</tr></thead>
    <tbody>${different.map((name) => html`<tr key=${name}><td><code>${name}</code></td>${settings.map((each, at) => html`<td key=${at}><${Value} value=${each[name]} /></td>`)}</tr>`)}</tbody>
  </table></div>`;
}
