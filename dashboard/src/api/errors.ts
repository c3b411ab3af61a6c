/** Validation errors of single form fields. */

import { ApiError } from "./client";

/** The last part of a field's path is its name: "body.dataset_id". */
export function errorOf(error: unknown, field: string): string | undefined {
  if (!(error instanceof ApiError)) return undefined;
  return error.details.find((detail) => detail.field?.split(".").at(-1) === field)?.message;
}

/** Errors inside one field, by the path within it. */
export function errorsInside(error: unknown, field: string): Record<string, string> {
  if (!(error instanceof ApiError)) return {};
  const start = `${field}.`;
  const inside = error.details.filter((detail) => detail.field?.startsWith(start));
  return Object.fromEntries(inside.map((detail) => [detail.field!.slice(start.length), detail.message ?? ""]));
}
