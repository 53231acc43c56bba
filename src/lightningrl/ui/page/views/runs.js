// What have I run, and how did it end? Choose up to eight to compare them.
import { html, useRef, useState } from "../vendor/preact.js";
import { exported, link, navigate, useApi } from "../api.js";
import { useKeys } from "../keys.js";
import { StateChip } from "../parts/chip.js";
import { Empty, Loading } from "../parts/empty.js";
import { ErrorBox } from "../parts/error.js";
import { duration, reward } from "../parts/figures.js";
import { Table } from "../parts/table.js";
import { Ago } from "../parts/time.js";

const MOST = 8; // runs to compare: as many colours can be told apart
const SEARCHED = 10; // with fewer runs, a search field is in the way

export default function Runs() {
  const { data, error } = useApi("/api/runs", { everyS: 5 });
  const [chosen, setChosen] = useState([]);
  const [text, setText] = useState("");
  const search = useRef(null);
  const toggle = (run) => setChosen((old) => (old.includes(run) ? old.filter((each) => each !== run) : [...old, run].slice(-MOST)));
  useKeys([
    ["x", "choose the row, to compare it", () => chooseFocused(toggle)],
    ["c", "compare the chosen runs", () => chosen.length > 1 && compare(chosen)],
    ["/", "search", () => search.current?.focus()],
  ]);
  if (data === undefined) return error ? html`<${ErrorBox} error=${error} />` : html`<${Loading} />`;
  if (data.runs.length === 0) return html`<${None} />`;
  const wanted = text.toLowerCase();
  const rows = data.runs.filter(({ run, recipe }) => `${run} ${recipe ?? ""}`.toLowerCase().includes(wanted));
  return html`
    ${error && html`<${ErrorBox} error=${error} />`}
    <div class="row apart">
      <h1>Runs</h1>
      <div class="row">
        ${data.runs.length > SEARCHED && html`<input ref=${search} type="search" placeholder="Search (/)" aria-label="Search runs" value=${text} onInput=${(event) => setText(event.target.value)} />`}
        ${data.runs.length > 1 && !exported && html`<button class="main" disabled=${chosen.length < 2} onClick=${() => compare(chosen)}>
          ${chosen.length < 2 ? "Choose runs to compare" : `Compare ${chosen.length} runs`}
        </button>`}
      </div>
    </div>
    ${rows.length === 0 && html`<p class="soft">No run has “${text}” in its name or recipe.</p>`}
    ${rows.length > 0 && html`<${Table} label="Runs, newest first" columns=${columns(chosen, toggle, data.runs.length > 1 && !exported)} rows=${rows} id=${({ run }) => run} href=${({ run }) => link(run)} mark=${({ run }) => chosen.includes(run)} />`}
    <p class="soft version">LightningRL ${data.version}. This page only reads.</p>
  `;
}

function compare(runs) {
  navigate(link(null, "compare", { runs: runs.map(encodeURIComponent).join(",") }));
}

function chooseFocused(toggle) {
  const run = document.activeElement.closest("tr")?.querySelector("input")?.value;
  if (run) toggle(run);
}

function None() {
  return html`<${Empty} title="No run here yet">
    <code>lightningrl demo</code> trains a small agent in a few minutes. Then <code>lightningrl ui</code> shows the runs in <code>runs/</code>, and <code>lightningrl ui RUN_DIR</code> one in another place.
  <//>`;
}

function columns(chosen, toggle, comparable) {
  const box = {
    key: "chosen",
    title: html`<span class="visually-hidden">Compare</span>`,
    cell: ({ run }) => html`<input type="checkbox" value=${run} aria-label=${`Compare ${run}`} title="Compare (x)" checked=${chosen.includes(run)} onChange=${() => toggle(run)} />`,
  };
  return [
    ...(comparable ? [box] : []),
    { key: "run", title: "Run", link: true, cell: ({ run }) => html`<span class="name">${run}</span>` },
    { key: "recipe", title: "Recipe", cell: ({ recipe }) => recipe ?? html`<span class="soft">–</span>` },
    { key: "state", title: "State", cell: ({ state }) => html`<${StateChip} state=${state} />` },
    { key: "steps", title: "Steps", number: true, tip: "Optimizer steps done, of all", cell: Steps },
    { key: "heldout", title: "Held-out reward", number: true, tip: "Mean reward on tasks that are never trained on: before → latest", cell: Heldout },
    { key: "learnt", title: "Did it learn?", cell: Learnt },
    { key: "rollouts", title: "Rollouts", number: true, tip: "Executions of the agent", cell: ({ rollouts, error }) => rollouts?.toLocaleString("en") ?? html`<span title=${error}>${error ? "cannot be read" : "–"}</span>` },
    { key: "time", title: "Took", number: true, tip: "Without the time from a stop to a resumption", cell: ({ seconds }) => duration(Math.round(seconds)) },
    { key: "began", title: "Began", number: true, cell: ({ began_at }) => html`<${Ago} at=${began_at} />` },
  ];
}

function Steps({ step, steps }) {
  if (steps === null) return html`<span class="soft">–</span>`;
  return html`${step}<span class="soft"> of ${steps}</span>`;
}

function Heldout({ heldout: { before, latest } }) {
  if (latest === null) return html`<span class="soft">–</span>`;
  return html`${before !== null && html`<span class="soft">${reward(before)} → </span>`}<strong>${reward(latest)}</strong>`;
}

const VERDICTS = {
  yes: ["good", "yes", "The gain on held-out tasks is more than chance"],
  no: ["soft", "not shown", "The change on held-out tasks may be chance"],
  worse: ["bad", "became worse", "The loss on held-out tasks is more than chance"],
};

function Learnt({ heldout: { learnt, before, latest }, state }) {
  if (learnt === null) {
    const measured = before !== null && latest !== null && latest !== before;
    return html`<span class="soft">${measured && state !== "complete" ? `${latest > before ? "+" : ""}${reward(latest - before)} so far` : "–"}</span>`;
  }
  const [tone, words, title] = VERDICTS[learnt];
  return html`<span class=${tone} title=${title}>${words}</span>`;
}
