// The page: a router over the hash, one layout for all views, keys, and what is shown when a view breaks.
import { Component, html, render, useEffect, useRef, useState } from "./vendor/preact.js";
import { exported, link, navigate, useApi, useConnection, useRoute } from "./api.js";
import { keysNow, useKeys } from "./keys.js";
import { switchTheme, useTheme } from "./theme.js";
import { StateChip } from "./parts/chip.js";
import { Empty } from "./parts/empty.js";
import { ErrorBox } from "./parts/error.js";
import Call from "./views/call.js";
import Compare from "./views/compare.js";
import Curves from "./views/curves.js";
import Group from "./views/group.js";
import Rollout from "./views/rollout.js";
import Rollouts from "./views/rollouts.js";
import Runs from "./views/runs.js";
import Settings from "./views/settings.js";
import Workers from "./views/workers.js";

const VIEWS = {
  runs: Runs,
  compare: Compare,
  curves: Curves,
  rollouts: Rollouts,
  group: Group,
  rollout: Rollout,
  call: Call,
  workers: Workers,
  settings: Settings,
};
const TABS = [
  ["curves", "Curves", []],
  ["rollouts", "Rollouts", ["rollouts"]],
  ["workers", "Workers", ["workers"]],
  ["settings", "Settings", ["settings"]],
];
const tables = new Map(); // run → the filters and the page of its table of rollouts, to come back to
const TAB_OF = { group: "rollouts", rollout: "rollouts", call: "rollouts" };

/** What a broken view leaves: the error and a way out; the rest of the page goes on. */
class Boundary extends Component {
  constructor() {
    super();
    this.state = { error: null };
  }

  static getDerivedStateFromError(error) {
    return { error };
  }

  componentDidUpdate(before) {
    if (before.at !== this.props.at && this.state.error !== null) this.setState({ error: null });
  }

  render({ children }) {
    if (this.state.error === null) return children;
    console.error(this.state.error);
    return html`<${ErrorBox} error=${this.state.error} title="This view broke" />`;
  }
}

function App() {
  const route = useRoute();
  const [help, setHelp] = useState(false);
  if (route.view === "rollouts") tables.set(route.run, route.query);
  useKeys([
    ["?", "show or hide this help", () => setHelp(!help)],
    ["t", "dark or light", switchTheme],
    ["u", "up: the view that this one belongs to", () => navigate(parents(route).at(-1)?.[1] ?? "#/")],
  ]);
  useEffect(() => {
    document.title = [...parents(route).map(([words]) => words).slice(1), titleOf(route)].reverse().join(" · ");
    scrollTo(0, 0);
  }, [route.view, route.run, route.group, route.rollout, route.call]);
  const View = VIEWS[route.view];
  return html`
    <a class="skip" href="#main" onClick=${skipToMain}>Skip to the content</a>
    <${Header} route=${route} onHelp=${() => setHelp(true)} />
    ${route.run && html`<${Tabs} route=${route} />`}
    <main id="main" tabindex="-1">
      <${Boundary} at=${location.hash}>
        ${View ? html`<${View} key=${route.view + (route.run ?? "")} route=${route} />` : html`<${NoView} />`}
      <//>
    </main>
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}
  `;
}

function skipToMain(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function NoView() {
  return html`<${Empty} title="There is no such view">The address is wrong. <a href="#/">All runs</a><//>`;
}

/** The views above this one: [[words, address]]. */
function parents({ view, run, rollout }) {
  const runs = ["Runs", "#/"];
  if (run === undefined) return view === "runs" ? [] : [runs];
  if (view === "curves") return [runs];
  const above = [runs, [run, link(run)]];
  const table = ["Rollouts", link(run, "rollouts", tables.get(run) ?? {})];
  if (view === "group" || view === "rollout") above.push(table);
  if (view === "call") above.push(table, [rollout, link(run, "rollout", rollout)]);
  return above;
}

function titleOf({ view, run, group, rollout, call }) {
  const titles = { runs: "LightningRL", curves: run, group: `Group ${group}`, rollout, call: `Call ${call}` };
  const words = titles[view] ?? view ?? "not found";
  return words[0].toUpperCase() === words[0] || run === words || rollout === words ? words : words[0].toUpperCase() + words.slice(1);
}

function Header({ route, onHelp }) {
  return html`<header class="top">
    <a class="brand" href="#/"><img src="icon.svg" alt="" width="20" height="20" />LightningRL</a>
    <nav aria-label="Where you are" class="crumbs">
      <ol>
        ${parents(route).map(([words, address]) => html`<li key=${address}><a href=${address}>${words}</a></li>`)}
        ${route.view !== "runs" && html`<li aria-current="page">${titleOf(route)}</li>`}
      </ol>
    </nav>
    ${route.run && html`<${RunState} run=${route.run} />`}
    <${ThemeButton} />
    <button class="quiet" title="Keys that do something here (?)" aria-label="Help: keys" onClick=${onHelp}>?</button>
  </header>`;
}

function RunState({ run }) {
  const { data } = useApi(`/api/runs/${encodeURIComponent(run)}`, { live: "state" });
  const connection = useConnection(run);
  if (exported) return html`<span class="chip" title="One file with a part of the run, as it was when it was exported">exported</span>`;
  const lost = connection === "lost";
  return html`<span role="status" class="row">
    ${lost && html`<span class="chip warn" title="The page ends with its run. lightningrl ui RUN_DIR shows it again.">not connected</span>`}
    ${data && !lost && html`<${StateChip} state=${data.state} />`}
  </span>`;
}

function ThemeButton() {
  const other = useTheme() === "dark" ? "light" : "dark";
  return html`<button class="quiet" title=${`Show the ${other} look (t)`} aria-label=${`Show the ${other} look`} onClick=${switchTheme}>
    ${other === "dark" ? "☾" : "☀"}
  </button>`;
}

function Tabs({ route }) {
  const open = TAB_OF[route.view] ?? route.view;
  return html`<nav class="tabs" aria-label="Views of this run">
    ${TABS.map(
      ([view, words, rest]) =>
        html`<a key=${view} href=${link(route.run, ...rest)} aria-current=${open === view ? "page" : undefined}>${words}</a>`,
    )}
  </nav>`;
}

const SIGNS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc" };

/** The keys that do something in the view that is open. */
function Help({ onClose }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  useKeys([["Escape", "close", onClose]]);
  return html`<dialog ref=${dialog} class="help" aria-label="Keys" onClose=${onClose} onClick=${(event) => event.target === dialog.current && onClose()}>
    <h2>Keys that do something here</h2>
    <dl>
      ${keysNow().map(
        ([keys, does]) => html`<div key=${does}><dt>${keys.map((key) => html`<kbd key=${key}>${SIGNS[key] ?? key}</kbd>`)}</dt><dd>${does}</dd></div>`,
      )}
    </dl>
    <p class="soft">A <em>run</em> trains in steps. In each step an agent tries tasks: each try is a <em>rollout</em>, made of <em>calls</em> to the model. <em>Rewards</em> say how good it was; rollouts of one task form a <em>group</em>, and are compared with each other.</p>
    <button onClick=${onClose}>Close</button>
  </dialog>`;
}

// The key of the page: the browser has it in a cookie now. It need not stay where people copy addresses from.
if (location.search !== "") history.replaceState(null, "", location.pathname + location.hash);
render(html`<${App} />`, document.getElementById("page"));
