// A table whose rows are links: sort by a header, walk with j and k or the arrows, open with Enter.
import { html, useRef } from "../vendor/preact.js";
import { useKeys } from "../keys.js";

const SCROLLS = { tabindex: 0, role: "region" }; // without links in it, keys could not scroll it

/**
 * `columns`: [{key, title, tip, number: bool, sort: name for `onSort`, cell(row)}]; the first cell holds the link,
 * or the one with `link: true`.
 * `href(row)`: where a row leads. `id(row)`: stays the same while the table changes. `sort`: "reward" or "-reward".
 * `label`: what the table lists, for screen readers. `keys: false` if another table of the view has the keys.
 */
export function Table({ columns, rows, href, id, sort, onSort, label, keys = true, mark }) {
  const body = useRef(null);
  return html`<div class="scroll" ...${href ? {} : SCROLLS} aria-label=${href ? undefined : label}>
    ${keys && href && html`<${RowKeys} body=${body} />`}
    <table aria-label=${label}>
      <thead>
        <tr>${columns.map((column) => html`<${Head} key=${column.key} column=${column} sort=${sort} onSort=${onSort} />`)}</tr>
      </thead>
      <tbody ref=${body}>
        ${rows.map((row) => html`<${Row} key=${id(row)} row=${row} columns=${columns} href=${href?.(row)} marked=${mark?.(row)} />`)}
      </tbody>
    </table>
  </div>`;
}

function Head({ column, sort, onSort }) {
  const { title, tip, number, sort: name } = column;
  if (!name || !onSort) return html`<th scope="col" class=${number ? "number" : ""} title=${tip}>${title}</th>`;
  const direction = { [name]: "ascending", [`-${name}`]: "descending" }[sort];
  const next = sort === `-${name}` ? name : `-${name}`;
  return html`<th scope="col" class=${number ? "number" : ""} title=${tip} aria-sort=${direction}>
    <button class="plain" onClick=${() => onSort(next)}>${title}<span aria-hidden="true">${{ ascending: " ↑", descending: " ↓" }[direction]}</span></button>
  </th>`;
}

function Row({ row, columns, href, marked }) {
  const open = (event) => {
    if (event.target.closest("a, button, input, label, summary") || getSelection().type === "Range") return;
    event.currentTarget.querySelector("a.open")?.click();
  };
  const lead = Math.max(0, columns.findIndex(({ link }) => link));
  return html`<tr class=${`${href ? "opens" : ""} ${marked ? "marked" : ""}`} onClick=${href && open}>
    ${columns.map(({ key, number, cell }, at) => {
      const inner = at === lead && href ? html`<a class="open" href=${href}>${cell(row)}</a>` : cell(row);
      return html`<td key=${key} class=${number ? "number" : ""}>${inner}</td>`;
    })}
  </tr>`;
}

/** The keys j, k and the arrows move the focus from row to row; Enter is the link's own. */
function RowKeys({ body }) {
  const move = (by) => () => {
    const links = [...body.current.querySelectorAll("a.open")];
    const at = links.findIndex((each) => each.closest("tr").contains(document.activeElement));
    const next = links[Math.min(Math.max(at + by, 0), links.length - 1)];
    next?.focus();
    return next !== undefined;
  };
  useKeys([
    ["j", "next row", move(1)],
    ["ArrowDown", "next row", move(1)],
    ["k", "row before", move(-1)],
    ["ArrowUp", "row before", move(-1)],
    ["Enter", "open the row", () => false],
  ]);
  return null;
}
