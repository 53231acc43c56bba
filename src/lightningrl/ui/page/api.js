// How does the page ask? `get` fetches JSON; `useApi` keeps an answer up to date while a view shows it.
import { useEffect, useRef, useState } from "./vendor/preact.js";
import * as addresses from "./address.js";
import { answerAt, exported, holds } from "./held.js";
import { onChange } from "./live.js";

export { exported, holds, whole } from "./held.js";
export { decoded, link, questions, setQuery, useRoute } from "./address.js";
export { onChange, useConnection } from "./live.js";

const KEPT = 40; // answers that are shown at once when somebody comes back to a view
const SOON_S = 0.2; // until an answer that was not finished is asked for again
const answers = new Map();
const askers = new Map(); // path → the one that asks for all who show its answer

/** What the server refused or could not do, with a hint. `status` is 0 if nothing answered. */
export class ApiError extends Error {
  constructor(message, hint, status) {
    super(message);
    this.hint = hint;
    this.status = status;
  }
}

/** Go to an address, as in address.js; an exported page stays where it is if it has nothing to show there. */
export function navigate(address, how) {
  if (holds(address)) addresses.navigate(address, how);
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
  const answer = answerAt(path);
  if (answer !== undefined) return answer;
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
    const asking = askers.get(path) ?? asker(path);
    again.current = asking.ask;
    return asking.join(setState);
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

/**
 * The one that asks for all who show the answer at `path`. It asks at most once at a time; a wish that comes meanwhile is
 * fulfilled once afterwards, and wishes of one moment together.
 */
function asker(path) {
  const control = new AbortController();
  const listeners = new Set();
  const tell = (change) => listeners.forEach((listener) => listener(change));
  const begun = (old) => (answers.has(path) ? { data: answers.get(path), path, error: null, loading: true } : { ...old, error: failed, loading: true });
  let busy = false;
  let wanted = false;
  let failed = null; // the latest error at this path: that of another path says nothing about this one
  async function work() {
    busy = true;
    while (wanted && !control.signal.aborted) {
      wanted = false;
      tell(begun);
      const next = await get(path, { signal: control.signal }).then(
        (data) => ({ data: kept(path, data), path, error: null, loading: false }),
        (error) => ({ error, loading: false }),
      );
      failed = next.error;
      if (!control.signal.aborted) tell((old) => ({ ...old, ...next }));
    }
    busy = false;
  }
  function ask() {
    if (!wanted && !busy) queueMicrotask(work);
    wanted = true;
  }
  function join(listener) {
    listeners.add(listener);
    if (busy) listener(begun);
    else ask();
    return () => {
      listeners.delete(listener);
      if (listeners.size > 0) return;
      control.abort();
      askers.delete(path);
    };
  }
  const made = { ask, join };
  askers.set(path, made);
  return made;
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
