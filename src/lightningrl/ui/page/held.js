// What does an exported page hold? One file has no server: a link to what is not in it is shown as plain words.
// It has its answers in <script type="application/json" id="embedded">: {"answers": {"/api/runs": …}, "whole": [ids of rollouts]}.
import { parse, questions } from "./address.js";
import { options } from "./vendor/preact.js";

const embedded = typeof document === "undefined" ? null : JSON.parse(document.getElementById("embedded")?.textContent ?? "null");
/** Whether this page is one exported file, without a server. */
export const exported = embedded !== null;
/** The ids of the rollouts that are there with all of their calls: the best, the worst and the median one. */
export const whole = embedded?.whole ?? [];

/** The answer at a path of the API, or undefined. */
export function answerAt(path) {
  return Object.hasOwn(embedded.answers, path) ? embedded.answers[path] : undefined;
}

/** The path of the answer without which the view of an address (`#/run/…`) has nothing to show; null: there is none. */
export function neededBy(address) {
  const { view, run, group, rollout, call, query } = parse(address);
  const base = `/api/runs/${encodeURIComponent(run)}`;
  const within = (...parts) => [base, ...parts.map(encodeURIComponent)].join("/");
  const attempt = questions({ attempt: query.attempt });
  const paths = {
    runs: "/api/runs",
    curves: base,
    settings: base,
    workers: within("workers"),
    rollouts: within("rollouts") + questions({ ...query, limit: 100 }),
    group: within("groups", group),
    rollout: within("rollouts", rollout) + attempt,
    call: within("rollouts", rollout, "calls", call) + attempt,
  };
  return paths[view] ?? null;
}

/** Whether the view of an address has what it shows: always, but on an exported page. */
export function holds(address) {
  if (!exported || !address.startsWith("#/")) return true;
  const path = neededBy(address);
  return path !== null && answerAt(path) !== undefined;
}

if (exported) {
  const before = options.vnode;
  options.vnode = (node) => {
    if (node.type === "a" && node.props.href && !holds(node.props.href)) {
      const { href, ...rest } = node.props;
      node.props = rest;
    }
    before?.(node);
  };
}
