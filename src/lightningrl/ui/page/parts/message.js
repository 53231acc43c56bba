// How is a message of the conversation shown? Its role, its text, its reasoning folded, its tool calls laid out.
import { html } from "../vendor/preact.js";
import { Folded, laidOut, visible } from "./plain.js";

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
      ${message.content !== "" && html`<${Folded} text=${role === "tool" ? laidOut(message.content) : message.content} mono=${role === "tool"} />`}
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
          ${given.map(([name, value]) => html`<div key=${name}><dt>${visible(name)}</dt><dd><${Folded} text=${typeof value === "string" ? value : JSON.stringify(value, null, 1)} lines=${8} mono /></dd></div>`)}
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

/** The result of a tool, as the telemetry or the next request told it. */
export function ToolResult({ tool }) {
  const failed = tool.status === "error";
  return html`<article class=${`message tool ${failed ? "failed" : ""}`}>
    <header><span class="role">tool</span> <strong>${visible(tool.name)}</strong> ${failed && html`<span class="bad">failed</span>`}</header>
    <div class="body">${failed && tool.error && html`<div class="bad"><${Folded} text=${tool.error} mono /></div>`}</div>
  </article>`;
}
