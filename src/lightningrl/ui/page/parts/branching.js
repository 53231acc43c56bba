// Where do the rollouts of a group part? The nodes of the API as branches, and what neighbours share.

const COLUMNS = 4; // of a tree that is not deeper, each call has a column

/** Whether a tree is too deep to be drawn from left to right: then it is drawn downwards. */
export function isDeep(nodes) {
  return nodes.some((node) => node.depth >= COLUMNS);
}

/** The nodes as [{nodes, below}]: in deep trees, calls that the same rollouts made in a row are one branch. A
 *  place with siblings ends one and begins another: there, each rollout has an advantage of its own. */
export function branchesOf(nodes) {
  const below = new Map();
  for (const node of nodes) below.set(node.parent, [...(below.get(node.parent) ?? []), node]);
  const deep = isDeep(nodes);
  const branch = (node) => {
    const chain = [node];
    let next = below.get(node.id) ?? [];
    while (deep && next.length === 1 && next[0].members.length === node.members.length && !next[0].siblings.length) {
      chain.push(next[0]);
      next = below.get(next[0].id) ?? [];
    }
    return { nodes: chain, below: next.map(branch).sort(best) };
  };
  return (below.get(null) ?? []).map(branch).sort(best);
}

function best(one, other) {
  return (other.nodes[0].reward ?? -Infinity) - (one.nodes[0].reward ?? -Infinity) || other.nodes[0].members.length - one.nodes[0].members.length;
}

/** [{call, branches}]: the branches of each place. */
export function placesOf(branches) {
  const found = new Map();
  for (const branch of branches) found.set(branch.call, [...(found.get(branch.call) ?? []), branch]);
  return [...found].map(([call, there]) => ({ call, branches: there }));
}

/** The text of an answer, tool calls included. */
export function wordsOf(answer) {
  if (answer === null) return "";
  const calls = (answer.tool_calls ?? []).map((call) => `→ ${call.name}(${inBrief(call.arguments)})`);
  return [answer.content, ...calls].filter(Boolean).join("\n");
}

/** `{"room": "study"}` → `room: "study"`. */
function inBrief(given) {
  try {
    const value = JSON.parse(given);
    if (value === null || typeof value !== "object" || Array.isArray(value)) return given;
    return Object.entries(value).map(([name, part]) => `${name}: ${JSON.stringify(part)}`).join(", ");
  } catch {
    return given;
  }
}

/** Number of characters that all texts share at the beginning, back to the end of a word; 0 for a single one. */
export function sharedLength(texts) {
  if (texts.length < 2) return 0;
  const [first, ...others] = texts;
  let length = 0;
  while (length < first.length && others.every((other) => other[length] === first[length])) length += 1;
  const ends = texts.every((text) => text.length === length || /\s/.test(text[length]));
  if (ends) return length;
  while (length > 0 && !/\s/.test(first[length - 1])) length -= 1;
  return length;
}
