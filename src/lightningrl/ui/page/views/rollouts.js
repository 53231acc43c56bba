// Which rollouts were there, and which went wrong? A table that is filtered and sorted by the server, page by page.
import { html, useEffect, useRef } from "../vendor/preact.js";
import { exported, get, link, questions, setQuery, useApi } from "../api.js";
import { useKeys } from "../keys.js";
import { Chip } from "../parts/chip.js";
import { Empty, Loading } from "../parts/empty.js";
import { ErrorBox } from "../parts/error.js";
import { count, duration, reward } from "../parts/figures.js";
import { FILTERS, filter, Filters } from "../parts/filters.js";
import { visible } from "../parts/plain.js";
import { Status } from "../parts/status.js";
import { Table } from "../parts/table.js";
import { Ago } from "../parts/time.js";
import { Whole } from "../parts/whole.js";

const PAGE = 100;

export default function RolloutsView({ route }) {
  const { run, query } = route;
  const offset = Math.max(0, Number(query.offset) || 0);
  const asked = Object.fromEntries(FILTERS.map((name) => [name, query[name]]));
  const base = `/api/runs/${encodeURIComponent(run)}/rollouts`;
  const at = (from) => base + questions({ ...asked, sort: query.sort, offset: from || null, limit: PAGE });
  const path = at(offset);
  const { data: shown, error, path: whose } = useApi(path, { live: offset === 0 ? "rollouts" : false, unfinished });
  const total = shown?.total ?? 0;
  const turn = (to) => () => (to < 0 || to >= total || to === offset ? false : setQuery({ offset: to || null }));
  useKeys([
    ["/", "search in what was said", () => document.getElementById("search")?.focus()],
    ["n", "next page", turn(offset + PAGE)],
    ["p", "page before", turn(offset - PAGE)],
  ]);
  useAhead(!exported && whose === path && offset + PAGE < total ? at(offset + PAGE) : null);
  return html`<div class="stack">
    <h1>Rollouts</h1>
    ${exported ? html`<${Whole} run=${run} />` : html`<${Filters} query=${query} data=${shown} />`}
    ${error && html`<${ErrorBox} error=${error} title="The rollouts cannot be listed" />`}
    ${!shown && !error && html`<${Loading} />`}
    ${shown && html`<div class=${whose === path ? "" : "stale"}>
      <${Errors} errors=${shown.errors} query=${query} />
      <${Progress} searched=${shown.searched} total=${total} text=${query.text} />
      ${total === 0 ? html`<${Nothing} query=${query} searched=${shown.searched} />` : html`<${Page} run=${run} data=${shown} query=${query} offset=${offset} turn=${turn} />`}
    </div>`}
  </div>`;
}

/** Whether the table is still being read, or what was said still being searched. The answer so far is shown. */
function unfinished(data) {
  return data?.complete === false || (data?.searched && data.searched.done < data.searched.of);
}

/** Fetch the next page before somebody turns to it. */
function useAhead(path) {
  useEffect(() => {
    if (path === null) return undefined;
    const control = new AbortController();
    const timer = setTimeout(() => get(path, { signal: control.signal }).catch(() => null), 400);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [path]);
}

function Nothing({ query, searched }) {
  if (searched && searched.done < searched.of) return html`<${Empty} title="Nothing found so far">The search goes on.<//>`;
  if (FILTERS.some((name) => query[name])) return html`<${Empty} title="No rollout matches">Take a filter away to see more.<//>`;
  return html`<${Empty} title="No rollouts yet">The first ones appear here as soon as the run has begun.<//>`;
}

/** How far the search in what was said has come. */
function Progress({ searched, total, text }) {
  if (!searched || !text) return null;
  const through = searched.done >= searched.of;
  const words = through ? `searched all ${searched.of.toLocaleString("en")} rollouts` : `searched ${searched.done.toLocaleString("en")} of ${searched.of.toLocaleString("en")} rollouts, newest first`;
  return html`<div class="row searching" role="status">
    ${!through && html`<progress max=${Math.max(1, searched.of)} value=${searched.done} aria-label="Search"></progress>`}
    <span class="soft">${total.toLocaleString("en")} found; ${words}</span>
  </div>`;
}

/** The errors with their numbers; each is a filter. */
function Errors({ errors, query }) {
  if (errors.length === 0) return null;
  return html`<details class="errors" open=${errors.length <= 5}>
    <summary>${errors.length === 1 ? "One error" : `${errors.length} different errors`}, ${errors.reduce((sum, each) => sum + each.count, 0).toLocaleString("en")} rollouts</summary>
    <ul>
      ${errors.map(
        (each) => html`<li key=${each.error}>
          <span class="number">${each.count.toLocaleString("en")} ×</span>
          ${exported ? html`<span class="bad">${visible(each.error)}</span>` : html`<button type="button" class="plain bad" aria-pressed=${query.error === each.error} onClick=${() => filter({ error: query.error === each.error ? null : each.error })}>${visible(each.error)}</button>`}
        </li>`,
      )}
    </ul>
  </details>`;
}

function Page({ run, data, query, offset, turn }) {
  const [low, high] = [data.histogram.edges[0], data.histogram.edges.at(-1)];
  return html`
    <${Turn} data=${data} offset=${offset} turn=${turn} />
    <div class="rollouts-table" ref=${useReturn(data)} onClick=${remember}><${Table} label="Rollouts" columns=${columnsOf(low, high, query)} rows=${data.rows} id=${(row) => row.id} href=${(row) => link(run, "rollout", row.id)}
      sort=${query.sort ?? "-queue"} onSort=${(sort) => setQuery({ sort: sort === "-queue" ? null : sort, offset: null })} /></div>
    ${data.rows.length > 30 && html`<${Turn} data=${data} offset=${offset} turn=${turn} label="Pages, below the table" />`}
  `;
}

const left = { address: null, row: null }; // the row that was opened last, to come back to

function remember(event) {
  const row = event.target.closest("a");
  if (row !== null) Object.assign(left, { address: location.hash, row: row.getAttribute("href") });
}

/** A ref of the table: when somebody comes back to it, the row that was opened has the focus. */
function useReturn(data) {
  const table = useRef(null);
  useEffect(() => {
    if (left.address !== location.hash) return;
    [...table.current.querySelectorAll("td a")].find((each) => each.getAttribute("href") === left.row)?.focus();
    left.address = null;
  }, [data]);
  return table;
}

function Turn({ data, offset, turn, label = "Pages" }) {
  const to = Math.min(data.total, offset + data.rows.length);
  const last = Math.floor((data.total - 1) / PAGE) * PAGE;
  return html`<nav class="row apart turn" aria-label=${label}>
    <span class="soft">${data.total.toLocaleString("en")} match${data.total > PAGE ? `, ${(offset + 1).toLocaleString("en")} to ${to.toLocaleString("en")} shown` : ""}${data.complete ? "" : "; the records are still being read"}</span>
    ${data.total > PAGE && html`<span class="row">
      <button type="button" class="small" disabled=${offset === 0} onClick=${turn(0)}>first</button>
      <button type="button" class="small" disabled=${offset === 0} onClick=${turn(Math.max(0, offset - PAGE))}>← page before</button>
      <button type="button" class="small" disabled=${to >= data.total} onClick=${turn(offset + PAGE)}>next page →</button>
      <button type="button" class="small" disabled=${to >= data.total} onClick=${turn(last)}>last</button>
    </span>`}
  </nav>`;
}

function columnsOf(low, high, query) {
  const text = (key, title, cell, more) => ({ key, title, cell, ...more });
  const number = (key, title, cell, tip) => ({ key, title, cell, tip, number: true, sort: key });
  return [
    text("id", "rollout", (row) => html`<span class="nowrap">${visible(row.id)}</span>${row.kind === "branch" && html` <${Chip} title="It repeats another rollout up to one of its calls">branch<//>`}`, { sort: "queue", tip: "In the order they were enqueued" }),
    number("step", "step", Step, "The optimizer step that learns from it, from 1; of an exam: the steps before it"),
    text("task", "task", (row) => html`<${Task} row=${row} text=${query.text} />`, { sort: "task" }),
    text("status", "status", (row) => html`<${Status} status=${row.status} />${row.attempts > 1 && html` <span class="soft" title="attempts">× ${row.attempts}</span>`}`),
    number("reward", "reward", (row) => html`<${Reward} value=${row.reward} low=${low} high=${high} />`, "The final reward"),
    number("calls", "calls", (row) => count(row.calls), "Calls to the model"),
    number("tokens", "tokens", (row) => count(row.tokens), "Tokens that were sampled"),
    number("seconds", "time", (row) => duration(row.seconds), "From the beginning to the end of the attempt"),
    number("began", "began", (row) => html`<${Ago} at=${row.began_at} />`, "When its attempt began"),
  ];
}

function Step({ step, kind }) {
  if (step === null) return html`<span class="soft">–</span>`;
  return kind === "exam" ? html`<span class="soft">after</span> ${step}` : step;
}

function Task({ row, text }) {
  return html`<span>${visible(row.task)}</span> <span class="soft">${visible(row.split)}</span>
    ${row.error && html`<div class="bad one-line">${visible(row.error)}</div>`}
    ${row.said && html`<div class="one-line">${hits(row.said, text)}</div>`}`;
}

/** The snippet with the searched text marked. */
function hits(said, text) {
  const at = text ? said.toLowerCase().indexOf(text.toLowerCase()) : -1;
  if (at < 0) return visible(said);
  return html`${visible(said.slice(0, at))}<mark>${visible(said.slice(at, at + text.length))}</mark>${visible(said.slice(at + text.length))}`;
}

function Reward({ value, low, high }) {
  if (value === null) return html`<span class="soft">–</span>`;
  const share = high > low ? (100 * (value - low)) / (high - low) : 100;
  return html`<span class="reward"><span class="reward-bar" aria-hidden="true"><span style=${{ width: `${share}%` }}></span></span>${reward(value)}</span>`;
}
