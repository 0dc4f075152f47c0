// The API's description at /docs, from /openapi.json.

import { request, setKey } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { parseAsWritten } from "./text.js";

const BASE = location.origin + location.pathname.replace(/docs$/, ""); // a proxy may serve all below a prefix
const METHODS = ["get", "post", "put", "delete"];
let api;

function resolve(schema) {
  const name = schema.$ref?.split("/").pop();
  return name ? { title: name, ...api.components.schemas[name] } : schema;
}

function alternatives(schema) {
  return (schema.anyOf ?? schema.oneOf ?? []).filter((option) => option.type !== "null");
}

// A schema in one line, such as "string or list of integer, 1 to 16 items".
function kind(schema) {
  if (schema.$ref) return resolve(schema).title;
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const options = alternatives(schema);
  if (options.length) return options.map(kind).join(" or ");
  if (schema.type === "array") return schema.items ? `list of ${kind(schema.items)}` : "list";
  return schema.type ?? "any";
}

const LIMITS = {
  minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<",
  minLength: "length ≥", maxLength: "length ≤", minItems: "items ≥", maxItems: "items ≤", maxProperties: "keys ≤",
};

function limits(schema) {
  const found = [schema, ...alternatives(schema)];
  return found.flatMap((option) =>
    Object.entries(LIMITS).filter(([name]) => option[name] !== undefined).map(([name, sign]) => `${sign} ${JSON.stringify(option[name])}`)
  ).join(", ");
}

// The objects inside a field: itself, the items of a list, each of several alternatives.
function inner(schema) {
  const found = resolve(schema);
  if (found.properties) return [found];
  if (found.items) return inner(found.items);
  return alternatives(found).flatMap(inner);
}

function fields(schema) {
  const required = new Set(schema.required);
  return Object.entries(schema.properties).map(([name, property]) => {
    const label = element("code", required.has(name) ? { class: "required" } : {}, name);
    const note = [kind(property), limits(property)].filter(Boolean).join(", ");
    const line = [label, " ", element("span", { class: "faint" }, note)];
    if (property.description) line.push(" – ", property.description);
    const objects = inner(property);
    if (!objects.length) return element("div", { class: "field" }, ...line);
    return fold("field", line, () => objects.flatMap((object) => describe(object)));
  });
}

function describe(schema) {
  const title = element("div", { class: "faint field" }, `${schema.title ?? "object"}: ${schema.description ?? ""}`);
  return [title, ...fields(schema)];
}

// Filled when it is opened: schemas may contain themselves.
function fold(name, summary, make) {
  const folded = element("details", { class: name }, element("summary", {}, ...summary));
  folded.addEventListener("toggle", () => folded.append(...make()), { once: true });
  return folded;
}

function section(title, schema) {
  const objects = inner(schema);
  const parts = objects.length ? objects.flatMap(describe) : [element("div", { class: "field faint" }, kind(schema))];
  return [element("h2", {}, title), ...parts];
}

function example(path, method, body) {
  const lines = [`curl ${BASE}${path.slice(1)}`];
  if (method !== "get") lines[0] += ` -X ${method.toUpperCase()}`;
  if (body) lines.push(`  -H 'Content-Type: application/json'`, `  -d '${JSON.stringify(body.example)}'`);
  return element("pre", {}, lines.join(" \\\n"));
}

// What stands as JSON in the data of a stream's events, first of all.
function event(schema) {
  const data = schema.properties?.data;
  return data?.contentSchema ?? data?.anyOf?.[0].contentSchema;
}

function endpoint(path, method, operation) {
  const summary = [
    element("span", { class: "method" }, method.toUpperCase()),
    element("code", {}, path),
    element("span", { class: "faint" }, operation.summary),
  ];
  const shown = fold("endpoint", summary, () => {
    const body = operation.requestBody?.content["application/json"];
    const answer = operation.responses["200"].content ?? {};
    const failure = operation.responses.default.content["application/json"].schema;
    return [
      example(path, method, body),
      ...(body ? section("Request", body.schema) : []),
      ...Object.entries(answer).flatMap(([type, { schema }]) =>
        section(`Answer as ${type}`, event(schema) ?? schema)
      ),
      ...section("Error", failure),
    ];
  });
  shown.dataset.text = `${path} ${operation.summary}`.toLowerCase();
  return shown;
}

async function load() {
  try {
    api = parseAsWritten(await (await request("openapi.json")).text());
  } catch (error) {
    byId("key").hidden = error.status !== 401;
    setText(byId("about"), error.message);
    return;
  }
  byId("key").hidden = true;
  byId("filter").hidden = false;
  setText(byId("about"), api.info.description);
  const shown = Object.entries(api.paths).flatMap(([path, operations]) =>
    METHODS.filter((method) => operations[method]).map((method) => endpoint(path, method, operations[method])),
  );
  byId("endpoints").replaceChildren(...shown);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key-field").value.trim());
  load();
});
byId("words").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase();
  for (const shown of byId("endpoints").children) shown.hidden = !shown.dataset.text.includes(words);
});
load();
