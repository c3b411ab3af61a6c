/** The form fields of a recipe; `configOf` builds the configuration. */

import type { ReactNode } from "react";

import { Field, Input, Select } from "../../components/controls";
import { keyOf, type FormField, type Typed } from "./schema";

export function SchemaForm(props: { fields: readonly FormField[]; typed: Typed; errors: Readonly<Record<string, string>>; onChange: (key: string, text: string) => void }) {
  return (
    <div className="grid gap-4 sm:grid-cols-2">
      {props.fields.map((field) => {
        const key = keyOf(field);
        const value = props.typed[key] ?? "";
        const change = (text: string) => props.onChange(key, text);
        const label = field.path.length > 1 ? `${field.path.slice(0, -1).join(" › ")} › ${field.label}` : field.label;
        return (
          <Field key={key} label={`${label}${field.required ? " *" : ""}`} hint={field.hint && withCode(field.hint)} error={props.errors[key]}>
            {(ids) =>
              field.kind === "boolean" ? (
                <Select {...ids} value={value} onChange={(event) => change(event.target.value)}>
                  <option value="false">No</option>
                  <option value="true">Yes</option>
                </Select>
              ) : field.kind === "choice" ? (
                <Select {...ids} value={value} onChange={(event) => change(event.target.value)}>
                  {!field.required && field.initial === "" && <option value="">–</option>}
                  {field.choices.map((choice) => <option key={choice} value={choice}>{choice}</option>)}
                </Select>
              ) : (
                <Input
                  {...ids}
                  inputMode={field.kind === "integer" ? "numeric" : field.kind === "number" ? "decimal" : "text"}
                  className={field.kind === "json" ? "font-mono" : ""}
                  value={value}
                  onChange={(event) => change(event.target.value)}
                />
              )
            }
          </Field>
        );
      })}
    </div>
  );
}

/** Descriptions mark names of settings with backticks. */
function withCode(hint: string): ReactNode {
  return hint.split("`").map((part, place) => (place % 2 === 1 ? <code key={place} className="font-mono">{part}</code> : part));
}
