// How are the rewards spread, and which range is chosen? A click chooses one bar, a drag several.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { figure } from "./figures.js";

/** `range`: [low, high] or null; `onRange` gets one of these. The last bar includes its upper edge. */
export function RewardBars({ edges, counts, range, onRange }) {
  const [drag, setDrag] = useState(null); // [first bar, latest bar] while the button is down
  const latest = useRef(null);
  latest.current = drag;
  useEffect(() => {
    const up = () => {
      if (latest.current === null) return;
      const [low, high] = ordered(latest.current);
      setDrag(null);
      onRange(same(range, edges[low], edges[high + 1]) ? null : [edges[low], edges[high + 1]]);
    };
    addEventListener("pointerup", up);
    return () => removeEventListener("pointerup", up);
  }, [edges, range, onRange]);
  const most = Math.max(1, ...counts);
  const chosen = (at) => {
    if (drag === null) return range !== null && range[0] < edges[at + 1] && edges[at] < range[1];
    const [low, high] = ordered(drag);
    return low <= at && at <= high;
  };
  return html`<div class="reward-bars" role="group" aria-label="Histogram of rewards; a bar chooses its range">
    <div class="bars">
      ${counts.map((size, at) => {
        const words = `reward ${figure(edges[at])} to ${figure(edges[at + 1])}: ${size.toLocaleString("en")}`;
        return html`<button key=${at} type="button" class="bar" title=${words} aria-label=${words} aria-pressed=${chosen(at)}
          onPointerDown=${(event) => begin(event, at, setDrag)} onPointerEnter=${() => drag !== null && setDrag([drag[0], at])}
          onKeyDown=${(event) => event.key === "Enter" && onRange(same(range, edges[at], edges[at + 1]) ? null : [edges[at], edges[at + 1]])}>
          <span style=${{ height: `${size ? Math.max(4, (100 * size) / most) : 0}%` }}></span>
        </button>`;
      })}
    </div>
    <div class="ends"><span>${figure(edges[0])}</span><span>reward</span><span>${figure(edges.at(-1))}</span></div>
  </div>`;
}

function begin(event, at, setDrag) {
  event.target.releasePointerCapture?.(event.pointerId); // touch keeps the pointer otherwise, and no other bar sees it
  event.preventDefault();
  setDrag([at, at]);
}

function ordered([one, other]) {
  return one <= other ? [one, other] : [other, one];
}

function same(range, low, high) {
  return range !== null && range[0] === low && range[1] === high;
}

/** "0..0.5" → [0, 0.5]; "1" → [1, 1]; an open end is infinite; null if it is no range. */
export function rangeOf(text) {
  if (!text) return null;
  const [low, high = low] = text.includes("..") ? text.split("..") : [text];
  const ends = [low === "" ? -Infinity : Number(low), high === "" ? Infinity : Number(high)];
  return ends.some(Number.isNaN) ? null : ends;
}
