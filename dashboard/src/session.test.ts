// @vitest-environment happy-dom

import { expect, it } from "vitest";

import type { Role, Session } from "./api/types";
import { may, refusalOf, ROLES, takeCode } from "./session";
import { viewsFor } from "./shell/views";

const as = (role: Role, job_id: string | null = null): Session => ({ name: "token ci (1)", role, job_id, signed_in: true });

it("lets each role do what the previous one may", () => {
  const table = ROLES.map((role) => ROLES.map((need) => may(as(role), need)));
  expect(table).toEqual([
    [true, false, false, false],
    [true, true, false, false],
    [true, true, true, false],
    [true, true, true, true],
  ]);
});

it("allows everything without a session", () => {
  expect(may(null, "admin")).toBe(true);
  expect(refusalOf(null, "operator")).toBeUndefined();
});

it("names the required role and the current one", () => {
  expect(refusalOf(as("viewer"), "operator")).toBe("Requires the operator role; you are signed in as viewer.");
  expect(refusalOf(as("admin"), "operator")).toBeUndefined();
});

it("shows only the views of a job to a session bound to it", () => {
  expect(viewsFor("task-1").map((view) => view.to)).toEqual(["/runs", "/logs", "/settings"]);
  expect(viewsFor(null).map((view) => view.to)).toContain("/workers");
});

it("returns the code of a link once and removes it from the address", () => {
  history.replaceState({ key: "kept" }, "", "/sign-in?x=1#code=abc-_1");
  expect(takeCode()).toBe("abc-_1");
  expect(location.href).not.toContain("abc");
  expect([location.pathname, location.search, location.hash]).toEqual(["/sign-in", "?x=1", ""]);
  expect(history.state).toEqual({ key: "kept" });
  expect(takeCode()).toBeNull();
});
