// Who runs what, since when, and what failed? And what waits?
import { html } from "../vendor/preact.js";
import { link, useApi } from "../api.js";
import { StatusChip } from "../parts/chip.js";
import { Empty, Loading } from "../parts/empty.js";
import { ErrorBox } from "../parts/error.js";
import { Table } from "../parts/table.js";
import { Ago } from "../parts/time.js";

export default function Workers({ route: { run } }) {
  const { data, error } = useApi(`/api/runs/${encodeURIComponent(run)}/workers`, { live: "rollouts" });
  if (data === undefined) return error ? html`<${ErrorBox} error=${error} />` : html`<${Loading} />`;
  const none = data.workers.length === 0 && data.queued === 0 && data.failures.length === 0;
  return html`<div class="stack">
    <h1>Workers and queue</h1>
    <${Counts} run=${run} counts=${data.counts} />
    ${none && html`<${Empty} title="No rollout was requested yet">Workers appear here with their first rollout.<//>`}
    ${data.workers.length > 0 && html`<section><h2>Workers</h2><${WorkerTable} run=${run} workers=${data.workers} /></section>`}
    ${!none && html`<section><h2>Failures <span class="unit">${data.failures.length > 0 ? "the latest first" : ""}</span></h2><${Failures} run=${run} failures=${data.failures} /></section>`}
    ${!none && html`<section><h2>Queue <span class="unit">${data.queued > 0 ? `${data.queued.toLocaleString("en")} rollouts wait` : ""}</span></h2><${Queue} run=${run} queue=${data.queue} queued=${data.queued} /></section>`}
  </div>`;
}

function Counts({ run, counts }) {
  const entries = Object.entries(counts);
  if (entries.length === 0) return null;
  return html`<dl class="tiles">
    ${entries.map(([status, number]) => html`<div class="tile" key=${status}><dt>${status}</dt><dd><a class="big" href=${link(run, "rollouts", { status })} aria-label=${`${number.toLocaleString("en")} rollouts ${status}`}>${number.toLocaleString("en")}</a></dd></div>`)}
  </dl>`;
}

function WorkerTable({ run, workers }) {
  const columns = [
    { key: "worker", title: "Worker", cell: ({ worker }) => html`<span class="mono">${worker}</span>` },
    { key: "running", title: "Runs now", cell: ({ running }) => html`<${Running} run=${run} running=${running} />` },
    { key: "ended", title: "Ended", number: true, tip: "Attempts that it has ended", cell: ({ ended }) => ended.toLocaleString("en") },
    { key: "failed", title: "Failed", number: true, tip: "Of these, attempts that failed", cell: ({ failed }) => html`<span class=${failed > 0 ? "bad" : "soft"}>${failed.toLocaleString("en")}</span>` },
    { key: "error", title: "Latest error", cell: ({ last_error: error }) => (error === null ? html`<span class="soft">none</span>` : html`<span class="clip">${error}</span>`) },
  ];
  return html`<${Table} label="Workers" columns=${columns} rows=${workers} id=${({ worker }) => worker} />`;
}

const SHOWN = 6; // rollouts of a worker; a worker may run a hundred at once

function Running({ run, running }) {
  if (running.length === 0) return html`<span class="soft">nothing</span>`;
  return html`<ul class="plain-list">
    ${running.slice(0, SHOWN).map(
      ({ rollout, attempt, since, task }) => html`<li key=${rollout}>
        <a href=${link(run, "rollout", rollout, { attempt })}>${rollout}</a> <span class="soft">since <${Ago} at=${since} />${attempt > 1 && `, attempt ${attempt}`}</span> <span class="clip soft">${task}</span>
      </li>`,
    )}
    ${running.length > SHOWN && html`<li class="soft">and ${running.length - SHOWN} more</li>`}
  </ul>`;
}

function Failures({ run, failures }) {
  if (failures.length === 0) return html`<p class="soft">No attempt has failed.</p>`;
  const columns = [
    { key: "rollout", title: "Rollout", cell: ({ rollout }) => rollout },
    { key: "at", title: "When", cell: ({ at }) => html`<${Ago} at=${at} />` },
    { key: "status", title: "Ended as", cell: ({ status }) => html`<${StatusChip} status=${status} />` },
    { key: "error", title: "Error", cell: ({ error }) => html`<span class="clip">${error ?? "–"}</span>` },
    { key: "worker", title: "Worker", cell: ({ worker }) => html`<span class="mono">${worker}</span>` },
  ];
  return html`<${Table} label="Latest failures" columns=${columns} rows=${failures} id=${({ rollout, at }) => `${rollout} ${at}`} href=${({ rollout }) => link(run, "rollout", rollout)} />`;
}

function Queue({ run, queue, queued }) {
  if (queued === 0) return html`<p class="soft">No rollout waits.</p>`;
  const columns = [
    { key: "id", title: "Rollout", cell: ({ id }) => id },
    { key: "task", title: "Task", cell: ({ task }) => html`<span class="clip">${task}</span>` },
    { key: "labels", title: "Needs", tip: "Labels that a worker must have", cell: ({ labels }) => labels.join(", ") || html`<span class="soft">any worker</span>` },
  ];
  return html`
    <${Table} label="Queue" columns=${columns} rows=${queue} id=${({ id }) => id} href=${({ id }) => link(run, "rollout", id)} keys=${false} />
    ${queued > queue.length && html`<p class="soft">The first ${queue.length} of ${queued.toLocaleString("en")}. <a href=${link(run, "rollouts", { status: "queued" })}>All of them</a></p>`}
  `;
}
