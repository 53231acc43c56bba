// When did a run change? One stream of server-sent events for each run and tab, closed while the tab is hidden.
import { useEffect, useState } from "./vendor/preact.js";

const streams = new Map(); // run → {source, listeners, latest, state}

/** Call `listener({metrics, rollouts, state})` when the run changes; returns a function that ends it. */
export function onChange(run, listener) {
  if (document.getElementById("embedded") !== null) return () => {}; // an exported page has no server
  const stream = streams.get(run) ?? { source: null, listeners: new Set(), latest: null, state: "connecting" };
  streams.set(run, stream);
  stream.listeners.add(listener);
  if (!document.hidden) open(run, stream);
  if (stream.latest !== null) listener(stream.latest); // what others of this tab know already
  return () => {
    stream.listeners.delete(listener);
    if (stream.listeners.size > 0) return;
    close(stream);
    streams.delete(run);
  };
}

/** "connecting", "live", or "lost" while nothing answers. */
export function useConnection(run) {
  const [state, setState] = useState("connecting");
  useEffect(() => {
    if (run === null) return undefined;
    return onChange(run, () => setState(streams.get(run)?.state ?? "connecting"));
  }, [run]);
  return state;
}

function open(run, stream) {
  if (stream.source !== null) return;
  const source = new EventSource(`api/runs/${encodeURIComponent(run)}/events`);
  stream.source = source;
  source.onopen = () => tell(stream, "live", stream.latest);
  source.onerror = () => tell(stream, "lost", stream.latest);
  source.addEventListener("change", (event) => tell(stream, "live", JSON.parse(event.data)));
}

function tell(stream, state, latest) {
  stream.state = state;
  stream.latest = latest;
  for (const listener of [...stream.listeners]) listener(latest);
}

function close(stream) {
  stream.source?.close();
  stream.source = null;
}

document.addEventListener("visibilitychange", () => {
  for (const [run, stream] of streams) {
    if (document.hidden) close(stream);
    else open(run, stream);
  }
});
