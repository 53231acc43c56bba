// How is a message of the conversation shown? Its role, its text, its reasoning folded, its tool calls laid out.
import { html } from "../vendor/preact.js";
import { Folded, laidOut, visible, written } from "./plain.js";

const ROLES = {
  system: "system",
  developer: "system",
  user: "user",
  assistant: "assistant",
  tool: "tool",
  prompt: "prompt",
};

/** `message`: {role, content, reasoning, tool_calls, tool_call_id, name}. `fresh`: it is the answer of this call. */
export function Message({ message, fresh = false }) {
  const role = ROLES[message.role] ?? "other";
  return html`<article class=${`message ${role} ${fresh ? "fresh" : ""}`}>
    <header>
      <span class="role">${visible(message.role)}</span>
      ${message.name && html`<span class="soft">${visible(message.name)}</span>`}
    </header>
    <div class="body">
      ${message.reasoning && html`<details class="reasoning"><summary>reasoning, ${message.reasoning.length.toLocaleString("en")} characters</summary><${Folded} text=${message.reasoning} /></details>`}
      ${message.content !== "" && html`<${Folded} text=${role === "tool" ? laidOut(message.content) : message.content} lines=${role === "tool" ? 8 : undefined} mono=${role === "tool"} />`}
      ${(message.tool_calls ?? []).map((call) => html`<${ToolCall} key=${call.id} call=${call} />`)}
      ${message.content === "" && !message.tool_calls?.length && html`<span class="soft">empty</span>`}
    </div>
  </article>`;
}

/** A tool call as the model wrote it: the name, then its arguments, one a line if they are short JSON. */
function ToolCall({ call }) {
  const given = fieldsOf(call.arguments);
  return html`<div class="tool-call">
    <div><span aria-hidden="true">→ </span><strong>${visible(call.name)}</strong>${given === null ? null : html` <span class="soft">tool call</span>`}</div>
    ${given === null
      ? html`<${Folded} text=${call.arguments} mono />`
      : html`<dl class="arguments">
          ${given.map(([name, value]) => html`<div key=${name}><dt>${visible(name)}</dt><dd><${Folded} text=${typeof value === "string" ? value : written(value)} lines=${8} mono /></dd></div>`)}
        </dl>`}
  </div>`;
}

function fieldsOf(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : null;
  } catch {
    return null;
  }
}

/** A tool that failed. `told`: a later message has the error, so that it is not repeated. */
export function FailedTool({ tool, told }) {
  return html`<div class="failed-tool bad">
    <strong>${visible(tool.name)} failed</strong>${tool.error && !told && html`: <${Folded} text=${tool.error} mono />`}
  </div>`;
}
