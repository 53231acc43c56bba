// How does the page ask? `get` fetches JSON; `useApi` keeps an answer up to date while a view shows it.
// An exported page has its answers in <script type="application/json" id="embedded">: {"answers": {"/api/runs": …}}.
import { useEffect, useRef, useState } from "./vendor/preact.js";
import { onChange } from "./live.js";

export { link, navigate, questions, setQuery, useRoute } from "./address.js";
export { onChange, useConnection } from "./live.js";

const embedded = JSON.parse(document.getElementById("embedded")?.textContent ?? "null");
/** Whether this page is one exported file, without a server. */
export const exported = embedded !== null;
const KEPT = 40; // answers that are shown at once when somebody comes back to a view
const SOON_S = 0.2; // until an answer that was not finished is asked for again
const answers = new Map();

/** What the server refused or could not do, with a hint. `status` is 0 if nothing answered. */
export class ApiError extends Error {
  constructor(message, hint, status) {
    super(message);
    this.hint = hint;
    this.status = status;
  }
}

/** The JSON at `/api/…`. Raises `ApiError`. */
export async function get(path, { signal } = {}) {
  if (exported) return answerOf(path);
  const response = await fetch(path.replace(/^\//, ""), { signal, headers: { accept: "application/json" } }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server does not answer", "the page ends with its run: `lightningrl ui RUN_DIR` shows it again", 0);
  });
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  const told = body?.error ?? { message: `the server answered with status ${response.status}`, hint: null };
  throw new ApiError(told.message, told.hint, response.status);
}

function answerOf(path) {
  if (path in embedded.answers) return embedded.answers[path];
  throw new ApiError("this exported page does not hold that", "`lightningrl ui RUN_DIR` shows the whole run", 404);
}

/**
 * {data, error, loading, path}: the answer at `path`, or nothing while `path` is null. `data` stays the old one, and
 * `path` says whose it is, until the new one has arrived. With `live`, it is fetched again when the run changes: `true` at every change,
 * "metrics", "rollouts" or "state" only for those; `everyS` asks again after so many seconds, and `unfinished` says of an answer
 * whether to ask again soon.
 */
export function useApi(path, { live = false, everyS = 0, unfinished = null } = {}) {
  const [state, setState] = useState(() => ({ data: answers.get(path), path, error: null, loading: true }));
  const again = useRef(() => {});
  useEffect(() => {
    if (path === null) return undefined;
    const asking = asker(path, setState);
    again.current = asking.ask;
    asking.ask();
    return asking.stop;
  }, [path]);
  const pauseS = unfinished?.(state.data) ? SOON_S : everyS;
  useEffect(() => (live && path !== null ? watch(path, live, () => again.current()) : undefined), [path, live]);
  useEffect(() => {
    if (!pauseS || exported) return undefined;
    const timer = setInterval(() => document.hidden || again.current(), pauseS * 1000);
    return () => clearInterval(timer);
  }, [pauseS]);
  return path === null ? { data: undefined, error: null, loading: false, path } : state;
}

/** Asks at most once at a time; a wish that comes meanwhile is fulfilled once afterwards. */
function asker(path, setState) {
  const control = new AbortController();
  let busy = false;
  let wanted = false;
  async function ask() {
    if (busy) {
      wanted = true;
      return;
    }
    busy = true;
    setState((old) => (answers.has(path) ? { data: answers.get(path), path, error: null, loading: true } : { ...old, loading: true }));
    const next = await get(path, { signal: control.signal }).then(
      (data) => ({ data: kept(path, data), path, error: null, loading: false }),
      (error) => ({ error, loading: false }),
    );
    busy = false;
    if (control.signal.aborted) return;
    setState((old) => ({ ...old, ...next }));
    if (wanted) {
      wanted = false;
      ask();
    }
  }
  return { ask, stop: () => control.abort() };
}

function kept(path, data) {
  answers.delete(path);
  answers.set(path, data);
  if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  return data;
}

function watch(path, live, again) {
  const run = /^\/api\/runs\/([^/?]+)/.exec(path)?.[1];
  if (run === undefined) return undefined;
  let seen = null;
  return onChange(decodeURIComponent(run), (latest) => {
    if (latest === null) return;
    const now = live === true ? JSON.stringify(latest) : `${latest[live]} ${latest.state}`;
    if (seen !== null && seen !== now) again();
    seen = now;
  });
}
