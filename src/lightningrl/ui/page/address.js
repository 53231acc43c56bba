// Which view does an address show? Addresses are behind the `#`, so that they can be sent to somebody.
import { useEffect, useState } from "./vendor/preact.js";

const PATTERNS = [
  ["runs", []],
  ["compare", ["compare"]],
  ["curves", ["run", ":run"]],
  ["rollouts", ["run", ":run", "rollouts"]],
  ["group", ["run", ":run", "group", ":group"]],
  ["rollout", ["run", ":run", "rollout", ":rollout"]],
  ["call", ["run", ":run", "rollout", ":rollout", "call", ":call"]],
  ["workers", ["run", ":run", "workers"]],
  ["settings", ["run", ":run", "settings"]],
];

/** The address of a view: `link("my-run", "rollout", id, "call", 3, { color: "ratio" })`; without a run, `link(null, …)`. */
export function link(run, ...rest) {
  const last = rest.at(-1);
  const query = last !== null && typeof last === "object" ? rest.pop() : {};
  const parts = run === null ? rest : ["run", run, ...rest];
  return `#/${parts.map(encoded).join("/")}${questions(query)}`;
}

/** `{a: 1, b: null}` → `?a=1`: what is null, undefined or empty is left out. Ranges and lists stay readable. */
export function questions(query) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const pairs = given.map(([name, value]) => `${encoded(name)}=${encoded(value).replaceAll("%2C", ",")}`);
  return pairs.length ? `?${pairs.join("&")}` : "";
}

/** What an address means: {view, run, group, rollout, call, query}; `view` is null if there is no such view. */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#?\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decoded);
  const query = Object.fromEntries(new URLSearchParams(search));
  for (const [view, pattern] of PATTERNS) {
    if (pattern.length !== parts.length) continue;
    if (!pattern.every((part, at) => part.startsWith(":") || part === parts[at])) continue;
    const named = pattern.flatMap((part, at) => (part.startsWith(":") ? [[part.slice(1), parts[at]]] : []));
    return { view, query, ...Object.fromEntries(named) };
  }
  return { view: null, query };
}

/** A part of an address. Half a surrogate pair, which no address can hold, becomes U+FFFD. */
function encoded(part) {
  return encodeURIComponent(String(part).toWellFormed());
}

/** What `encodeURIComponent` made of a part; a part with a stray `%` stays as it is. */
export function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a stray `%` that somebody typed
  }
}

/** Go to an address. With `replace`, the browser's back button skips the one before: for filters and sorting. */
export function navigate(address, { replace = false } = {}) {
  if (!replace) {
    location.hash = address;
    return;
  }
  history.replaceState(null, "", address);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** Change some questions of the current address; null removes one. */
export function setQuery(changes) {
  const [path, search = ""] = location.hash.split("?");
  const query = { ...Object.fromEntries(new URLSearchParams(search)), ...changes };
  navigate(`${path || "#/"}${questions(query)}`, { replace: true });
}

/** The current route; the component is drawn again when the address changes. */
export function useRoute() {
  const [route, setRoute] = useState(() => parse(location.hash));
  useEffect(() => {
    const changed = () => setRoute(parse(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}
