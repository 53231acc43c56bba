// Which keys do something here? Each view lists its own; the latest one that knows a key gets it.
import { useEffect, useRef } from "./vendor/preact.js";

const layers = [];

/** `useKeys([["j", "next row", next], …])`: a key, what it does (for the help), and the function that does it. */
export function useKeys(keys) {
  const layer = useRef(keys);
  layer.current = keys;
  useEffect(() => {
    layers.push(layer);
    return () => layers.splice(layers.indexOf(layer), 1);
  }, []);
}

/** All keys that do something now: [[key, what it does]]; the same words of several keys are joined. */
export function keysNow() {
  const words = new Map();
  const taken = new Set();
  for (const layer of [...layers].reverse()) {
    for (const [key, does] of layer.current) {
      if (taken.has(key)) continue;
      taken.add(key);
      words.set(does, [...(words.get(does) ?? []), key]);
    }
  }
  return [...words].map(([does, keys]) => [keys, does]);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const field = event.target.closest?.("input:not([type=checkbox]), select, textarea, [contenteditable]");
  if (field) {
    if (field.localName === "input" && (event.key === "Enter" || event.key === "Escape")) leave(field, event);
    return;
  }
  for (const layer of [...layers].reverse()) {
    const found = layer.current.find(([key]) => key === event.key);
    if (found === undefined) continue;
    if (found[2](event) !== false) event.preventDefault(); // false: the browser's own meaning of the key stays
    return;
  }
});

/** Enter and Escape lead from a field back to the keys of the view; its text stays. */
function leave(field, event) {
  event.preventDefault();
  field.blur();
}
