/** A recipe's JSON Schema as a form: flat fields, and the configuration from their input. Pure. */

export interface JsonSchema {
  type?: string | string[];
  title?: string;
  description?: string;
  default?: unknown;
  enum?: unknown[];
  const?: unknown;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  properties?: Record<string, JsonSchema>;
  required?: string[];
  anyOf?: JsonSchema[];
  oneOf?: JsonSchema[];
  allOf?: JsonSchema[];
  $ref?: string;
  $defs?: Record<string, JsonSchema>;
  definitions?: Record<string, JsonSchema>;
}

export interface FormField {
  /** Keys from the outside in. */
  path: string[];
  label: string;
  hint: string;
  /** `json`: anything without a better form control. */
  kind: "text" | "integer" | "number" | "boolean" | "choice" | "json";
  required: boolean;
  /** Initial text. */
  initial: string;
  choices: string[];
  min?: number | undefined;
  /** Exclusive minimum. */
  above?: number | undefined;
  max?: number | undefined;
}

export type Typed = Readonly<Record<string, string>>;

const DEEPEST = 4;

export function keyOf(field: FormField): string {
  return field.path.join(".");
}

export function fieldsOf(schema: JsonSchema): FormField[] {
  return inside(schema, schema, [], 0);
}

function inside(schema: JsonSchema, root: JsonSchema, path: string[], depth: number): FormField[] {
  const required = new Set(schema.required ?? []);
  return Object.entries(schema.properties ?? {}).flatMap(([name, raw]) => {
    const [property, optional] = resolved(raw, root);
    const here = [...path, name];
    if (typeOf(property) === "object" && property.properties && depth < DEEPEST) return inside(property, root, here, depth + 1);
    return [fieldOf(property, here, required.has(name) && !optional && property.default === undefined)];
  });
}

/** Follows references, and unwraps `anyOf` with null. */
function resolved(schema: JsonSchema, root: JsonSchema, depth = 0): [JsonSchema, optional: boolean] {
  if (depth > DEEPEST) return [{}, false];
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1) ?? "";
    const target = root.$defs?.[name] ?? root.definitions?.[name] ?? {};
    const { $ref: _reference, ...rest } = schema;
    return resolved({ ...target, ...rest }, root, depth + 1);
  }
  if (schema.allOf?.length === 1) {
    const { allOf, ...rest } = schema;
    return resolved({ ...allOf[0], ...rest }, root, depth + 1);
  }
  const choices = schema.anyOf ?? schema.oneOf;
  const real = choices?.filter((choice) => choice.type !== "null");
  if (choices && real?.length === 1) {
    const { anyOf: _any, oneOf: _one, ...rest } = schema;
    const [found] = resolved({ ...real[0], ...rest }, root, depth + 1);
    return [found, real.length < choices.length];
  }
  return [schema, Array.isArray(schema.type) && schema.type.includes("null")];
}

function typeOf(schema: JsonSchema): string | undefined {
  return Array.isArray(schema.type) ? schema.type.find((type) => type !== "null") : schema.type;
}

function fieldOf(schema: JsonSchema, path: string[], required: boolean): FormField {
  const type = typeOf(schema);
  const choices = schema.enum?.filter((choice) => choice !== null).map(String) ?? [];
  const kind: FormField["kind"] =
    choices.length > 0 ? "choice" : type === "integer" || type === "number" || type === "boolean" ? type : type === "string" ? "text" : "json";
  return {
    path,
    label: schema.title ?? titleOf(path.at(-1) ?? ""),
    hint: schema.description ?? "",
    kind,
    required,
    initial: initialOf(schema.default, kind),
    choices,
    min: schema.minimum,
    above: schema.exclusiveMinimum,
    max: schema.maximum,
  };
}

function initialOf(value: unknown, kind: FormField["kind"]): string {
  if (kind === "boolean") return value === true ? "true" : "false";
  if (value === undefined || value === null) return "";
  return kind === "json" ? JSON.stringify(value) : String(value);
}

function titleOf(name: string): string {
  const text = name.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export function initially(fields: readonly FormField[]): Typed {
  return Object.fromEntries(fields.map((field) => [keyOf(field), field.initial]));
}

/** The configuration, and errors by field. Empty and unchanged fields are left to the recipe. */
export function configOf(fields: readonly FormField[], typed: Typed): { config: Record<string, unknown>; errors: Record<string, string> } {
  const config: Record<string, unknown> = {};
  const errors: Record<string, string> = {};
  for (const field of fields) {
    const text = typed[keyOf(field)] ?? "";
    if (text === "" && field.required) errors[keyOf(field)] = "Required.";
    if (text === "" || (text === field.initial && !field.required)) continue;
    const read = parsed(field, text);
    if ("wrong" in read) errors[keyOf(field)] = read.wrong;
    else put(config, field.path, read.value);
  }
  return { config, errors };
}

function parsed(field: FormField, text: string): { value: unknown } | { wrong: string } {
  switch (field.kind) {
    case "text":
    case "choice":
      return { value: text };
    case "boolean":
      return { value: text === "true" };
    case "integer":
    case "number": {
      const value = Number(text);
      if (text.trim() === "" || !Number.isFinite(value)) return { wrong: "Must be a number." };
      if (field.kind === "integer" && !Number.isInteger(value)) return { wrong: "Must be an integer." };
      if (field.min !== undefined && value < field.min) return { wrong: `Must be at least ${field.min}.` };
      if (field.above !== undefined && value <= field.above) return { wrong: `Must be greater than ${field.above}.` };
      if (field.max !== undefined && value > field.max) return { wrong: `Must be at most ${field.max}.` };
      return { value };
    }
    case "json":
      try {
        return { value: JSON.parse(text) as unknown };
      } catch {
        return { wrong: "Must be valid JSON." };
      }
  }
}

function put(target: Record<string, unknown>, path: readonly string[], value: unknown): void {
  const [name, ...rest] = path;
  if (name === undefined) return;
  if (rest.length === 0) {
    Object.defineProperty(target, name, { value, enumerable: true, configurable: true, writable: true });
    return;
  }
  const inner = Object.hasOwn(target, name) ? (target[name] as Record<string, unknown>) : {};
  Object.defineProperty(target, name, { value: inner, enumerable: true, configurable: true, writable: true });
  put(inner, rest, value);
}
