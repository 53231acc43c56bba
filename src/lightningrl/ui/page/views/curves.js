// Is it learning, and is the learning signal healthy?
import { html, useCallback, useMemo, useState } from "../vendor/preact.js";
import { exported, link, navigate, useApi } from "../api.js";
import { anchorOf, chartsOf } from "../charts.js";
import { useKeys } from "../keys.js";
import { useMetrics } from "../metrics.js";
import { ChartCard } from "../parts/chartcard.js";
import { Empty, Loading } from "../parts/empty.js";
import { ErrorBox } from "../parts/error.js";
import { HealthPanel } from "../parts/health.js";
import { RewardChart } from "../parts/rewardchart.js";
import { Summary } from "../parts/summary.js";
import { Whole } from "../parts/whole.js";

export default function Curves({ route }) {
  const address = `/api/runs/${encodeURIComponent(route.run)}`;
  const { data: run, error } = useApi(address, { live: true });
  const { data: journal, error: unread } = useMetrics(route.run);
  if (run === undefined || journal === undefined) {
    return error || unread ? html`<${ErrorBox} error=${error ?? unread} />` : html`<${Loading} />`;
  }
  return html`<div class="stack">
    <${Summary} run=${run} journal=${journal} />
    <${Whole} run=${run.run} />
    ${journal.rows.some(({ kind }) => kind === "step" || kind === "exam") ? html`<${Charts} run=${run} journal=${journal} address=${address} />` : html`<${Early} run=${run} />`}
  </div>`;
}

/** Before the first step. */
function Early({ run }) {
  const rollouts = html`<a href=${link(run.run, "rollouts")}>its rollouts</a>`;
  if (run.steps === null) return html`<${Empty} title="Nothing was trained here">This run has records of rollouts but no training steps: see ${rollouts}.<//>`;
  if (run.state === "running") return html`<${Empty} title="The first step is not finished yet">Curves appear here after it, without a reload. Meanwhile, see ${rollouts}.<//>`;
  return html`<${Empty} title="The run ended before its first step">See ${rollouts} and the run's agents.log for the reason.<//>`;
}

function Charts({ run, journal, address }) {
  const { data: health, error } = useApi(`${address}/health`, { live: "metrics" });
  const rows = useMemo(() => journal.rows.filter(({ kind }) => kind === "step"), [journal]);
  const sections = useMemo(() => chartsOf(rows, run.policies), [rows, run.policies.join()]);
  const cursor = useCursor(run.run, journal, rows);
  const advice = adviceOf(health);
  const about = (id) => advice.filter(({ metric }) => metric && anchorOf(sections, metric, run.policies) === id);
  return html`
    <${HealthPanel} health=${health} error=${error} advice=${advice} anchor=${(metric) => anchorOf(sections, metric, run.policies)} />
    <${Readout} run=${run.run} cursor=${cursor} events=${journal.events} />
    <${RewardChart} run=${run} journal=${journal} cursor=${cursor} advice=${about("chart-reward")} />
    ${sections.map(
      (section) => html`<${Section} key=${section.title} section=${section}>
        ${section.charts.map((chart) => html`<${ChartCard} key=${chart.id} chart=${chart} policies=${run.policies} cursor=${cursor} advice=${about(chart.id)} />`)}
      <//>`,
    )}
  `;
}

function Section({ section, children }) {
  if (!section.folded) {
    return html`<section><h2>${section.title}</h2><div class="charts">${children}</div><${Zeros} charts=${section.zeros} /></section>`;
  }
  return html`<${Folded} title=${`${section.title} (${section.charts.length})`}>${children}<//>`;
}

function Zeros({ charts }) {
  if (charts.length === 0) return null;
  return html`<p class="zeros soft">Always 0: ${charts.map(({ id, title, tip }, at) => html`${at > 0 && ", "}<span key=${id} id=${id} title=${tip}>${title.toLowerCase()}</span>`)}.</p>`;
}

/** Plots are made only when they are unfolded. */
function Folded({ title, children }) {
  const [open, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><h2>${title}</h2></summary>
    ${open && html`<div class="charts">${children}</div>`}
  </details>`;
}

/** The one cursor of all plots: the chosen step, and how to move it with the mouse and the keys. */
function useCursor(run, journal, rows) {
  const [step, setStep] = useState(null);
  const x = useMemo(() => rows.map((row) => row.step + 1), [rows]);
  const marks = useMemo(() => journal.events.filter(({ kind }) => kind !== "began").map(({ step, kind }) => ({ x: step + 1, kind })), [journal.events]);
  const last = x.at(-1) ?? 0;
  const onOpen = useCallback((at) => at > 0 && navigate(link(run, "rollouts", trained(at))), [run]);
  const move = (by) => () => setStep((old) => Math.min(Math.max((old ?? last + (by < 0 ? 1 : 0)) + by, 1), last));
  useKeys([
    ["ArrowRight", "next step", move(1)],
    ["ArrowLeft", "step before", move(-1)],
    ["Enter", "rollouts of the chosen step", (event) => (event.target.closest("a, button, summary") || step === null ? false : onOpen(step))],
    ["Escape", "show the latest step again", () => setStep(null)],
  ]);
  return { x, last, step, marks, onStep: setStep, onOpen };
}

/** The question for the rollouts that a step learnt from: an exam after as many steps has the same number. */
function trained(step) {
  return { step, split: "train" };
}

/** What happened in the chosen step; always there, so that nothing jumps. */
function Readout({ run, cursor, events }) {
  const { step, last } = cursor;
  if (step === null) {
    return html`<p class="readout soft">Point at a curve to read a step in all of them${exported ? "." : "; click to see its rollouts."} Keys: <kbd>←</kbd> <kbd>→</kbd> ${!exported && html`<kbd>Enter</kbd>`}</p>`;
  }
  const told = events.filter((event) => event.kind !== "began" && event.step + 1 === step).map(({ text }) => text.split("; hint:")[0]);
  return html`<p class="readout" role="status">
    <strong>${step === 0 ? "Before the first step" : `Step ${step} of ${last}`}</strong>
    ${step > 0 && !exported && html`<a href=${link(run, "rollouts", trained(step))}>its rollouts</a>`}
    ${told.map((text) => html`<span class="warned-text" key=${text} title=${text}>${text.replaceAll("`", "")}</span>`)}
  </p>`;
}

function adviceOf(health) {
  if (health === undefined) return [];
  return [...health.warnings.map((each) => ({ ...each, warning: true })), ...health.notes.map((each) => ({ ...each, warning: false }))];
}
