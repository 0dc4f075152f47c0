// The dialog for the API key. It opens by itself when the server refuses a request.

import { hasKey, setKey } from "./api.js";
import { byId, setText } from "./dom.js";

let waiting = [];

export function setUpKey() {
  const dialog = byId("key");
  byId("key-button").addEventListener("click", () => open(""));
  byId("key-cancel").addEventListener("click", () => dialog.close());
  dialog.querySelector("form").addEventListener("submit", () => {
    setKey(byId("key-field").value.trim());
    const resumed = waiting;
    waiting = [];
    for (const resume of resumed) resume();
  });
  dialog.addEventListener("close", () => {
    byId("key-field").value = "";
  });
}

function open(problem) {
  const dialog = byId("key");
  setText(byId("key-problem"), problem);
  byId("key-problem").classList.toggle("wrong", hasKey());
  if (!dialog.open) dialog.showModal();
  byId("key-field").focus();
}

export function askForKey() {
  open(hasKey() ? "The server does not know this key." : "This server asks for a key.");
}

// Calls `resume` once when a key has been entered.
export function afterNextKey(resume) {
  waiting.push(resume);
}
