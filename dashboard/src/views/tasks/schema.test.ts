import { describe, expect, it } from "vitest";

import { configOf, fieldsOf, initially, keyOf, type JsonSchema } from "./schema";

const SCHEMA: JsonSchema = {
  type: "object",
  required: ["steps", "model"],
  $defs: {
    Model: { type: "object", required: ["width"], properties: { width: { type: "integer", minimum: 1 }, kind: { enum: ["gpt", "mlp"], default: "gpt" } } },
  },
  properties: {
    steps: { type: "integer", title: "Steps", minimum: 1, description: "How many." },
    lr: { anyOf: [{ type: "number", exclusiveMinimum: 0 }, { type: "null" }], default: 0.1 },
    model: { $ref: "#/$defs/Model" },
    compile: { type: "boolean", default: false },
    layers: { type: "array" },
  },
};

describe("the form of a recipe", () => {
  const fields = fieldsOf(SCHEMA);

  it("has a field for every setting, including nested ones", () => {
    expect(fields.map(keyOf)).toEqual(["steps", "lr", "model.width", "model.kind", "compile", "layers"]);
    expect(fields.map((field) => field.kind)).toEqual(["integer", "number", "integer", "choice", "boolean", "json"]);
    expect(fields[0]).toMatchObject({ label: "Steps", hint: "How many.", required: true, min: 1 });
    expect(fields[1]).toMatchObject({ required: false, initial: "0.1" });
  });

  it("sends only changed or required fields", () => {
    const typed = { ...initially(fields), steps: "100", "model.width": "8", layers: "[1, 2]", compile: "true" };
    expect(configOf(fields, typed)).toEqual({ config: { steps: 100, model: { width: 8 }, compile: true, layers: [1, 2] }, errors: {} });
  });

  it("reports errors by field", () => {
    const typed = { ...initially(fields), steps: "0", lr: "0", "model.width": "1.5", layers: "[" };
    const { config, errors } = configOf(fields, typed);
    expect(Object.keys(errors)).toEqual(["steps", "lr", "model.width", "layers"]);
    expect(config).toEqual({});
  });

  it("handles names of built-in object properties", () => {
    const odd = fieldsOf({ properties: { __proto__x: { type: "string" }, constructor: { type: "object", properties: { a: { type: "string" } } } } });
    expect(configOf(odd, { __proto__x: "1", "constructor.a": "2" }).config).toEqual({ __proto__x: "1", constructor: { a: "2" } });
  });
});
