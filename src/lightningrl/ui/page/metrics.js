// What was measured in each step of a run? Reads the metrics with a cursor, so that each row comes over the wire once.
import { useEffect, useState } from "./vendor/preact.js";
import { get, onChange } from "./api.js";

const journals = new Map(); // run → {rows, events, intervals, cursor}: shown at once when somebody comes back
const SOON_MS = 500; // until the intervals are asked for again, which need all rollouts of the run
const EMPTY = { rows: [], events: [], intervals: {}, cursor: null };

/** {data: {rows, events, intervals} or undefined, error}: the metrics of a run, kept up to date while it goes on. */
export function useMetrics(run) {
  const [state, setState] = useState({ data: journals.get(run), error: null });
  useEffect(() => {
    setState({ data: journals.get(run), error: null });
    return follow(run, (next) => setState((old) => ({ ...old, ...next })));
  }, [run]);
  return state;
}

/** run → the same as `useMetrics`, for several runs. They are asked every few seconds: a stream each would use up the
 * browser's connections. */
export function useManyMetrics(runs, everyS = 5) {
  const [states, setStates] = useState({});
  const names = runs.join("/");
  useEffect(() => {
    const refresh = () => runs.forEach((run) => load(run).then((next) => setStates((old) => ({ ...old, [run]: { ...old[run], ...next } }))));
    refresh();
    const timer = setInterval(() => document.hidden || refresh(), everyS * 1000);
    return () => clearInterval(timer);
  }, [names]);
  return states;
}

function follow(run, onNews) {
  let ended = false;
  let seen = null;
  const refresh = () =>
    load(run).then((next) => {
      if (ended) return;
      onNews(next);
      if (next.data?.complete === false) setTimeout(refresh, SOON_MS);
    });
  refresh();
  const stop = onChange(run, (latest) => {
    if (latest === null || latest.metrics === seen) return;
    seen = latest.metrics;
    if (seen !== journals.get(run)?.cursor) refresh();
  });
  return () => {
    ended = true;
    stop();
  };
}

/** The next rows, appended to those that are known. If nothing is new, the same object as before. */
async function load(run) {
  const before = journals.get(run) ?? EMPTY;
  const after = before.cursor === null ? "" : `?after=${encodeURIComponent(before.cursor)}`;
  try {
    const news = await get(`/api/runs/${encodeURIComponent(run)}/metrics${after}`);
    if (journals.get(run) === before && !news.reset && news.rows.length === 0 && before.complete !== false) return { data: before, error: null };
    const rows = news.reset || before.cursor === null ? news.rows : [...before.rows, ...news.rows];
    const data = { rows, events: news.events, intervals: news.intervals, complete: news.complete, cursor: news.cursor };
    if ((journals.get(run) ?? EMPTY) === before) journals.set(run, data); // else another load was faster
    return { data: journals.get(run), error: null };
  } catch (error) {
    return { error };
  }
}
