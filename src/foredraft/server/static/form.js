// Form of the request. The API key is stored for this tab only.

import { ApiError } from "./api.js";

const KEY = "foredraft.key";
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "seed"];
const field = (id) => document.getElementById(id);

// Builds the request from the form. Empty fields are left out, so that the server's defaults apply.
export function readRequest(model) {
  const body = { stream: true, stream_options: { include_usage: true }, foredraft_trace: true };
  if (model) body.model = model;
  for (const id of NUMBERS) {
    const input = field(id);
    if (input.validity.badInput) throw new ApiError(`${input.labels[0].textContent} is not a number.`, 0);
    if (input.value !== "") body[id] = Number(input.value);
  }
  const draft = field("draft").value;
  if (draft !== "auto") body.speculative = { num_speculative_tokens: Number(draft) };
  const prompt = field("prompt").value;
  const isChat = document.querySelector("input[name=kind]:checked").value === "chat";
  if (isChat) body.messages = [{ role: "user", content: prompt }];
  else body.prompt = prompt;
  return { path: isChat ? "v1/chat/completions" : "v1/completions", body };
}

// Makes the prompt's box as high as its text, up to the limit in the style sheet.
function fitPrompt() {
  const box = field("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`;
}

export function installPromptFitting() {
  field("prompt").addEventListener("input", fitPrompt);
  addEventListener("resize", fitPrompt);
  fitPrompt();
}

// The same request without drafts.
export const withoutDrafts = (request) => ({
  ...request,
  body: { ...request.body, speculative: { num_speculative_tokens: 0 } },
});

// Reads the API key from its field, or from this tab's storage; "" if there is none.
export function readKey() {
  const input = field("key");
  if (input.value) sessionStorage.setItem(KEY, input.value);
  else if (!field("key-field").hidden) sessionStorage.removeItem(KEY);
  return sessionStorage.getItem(KEY) ?? "";
}

// Shows the API key field and returns the message for it. A refused key is deleted and selected for replacement.
export function askForKey() {
  const isFirst = !readKey();
  sessionStorage.removeItem(KEY);
  field("key-field").hidden = false;
  field("key").focus();
  field("key").select();
  return isFirst ? "This server needs its API key." : "The server refused this API key; type it again.";
}

export function hideKey() {
  field("key-field").hidden = true;
}
