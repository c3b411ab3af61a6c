// @vitest-environment happy-dom

import { renderToStaticMarkup } from "react-dom/server";
import { expect, it } from "vitest";

import type { Verification } from "../../api/types";
import { Outcome } from "./Verify";

const text = (found: Partial<Verification>) => renderToStaticMarkup(<Outcome found={{ checkpoint_id: "c", status: "verifying", size_bytes: 1, damages: [], reason: "", ...found }} />).replaceAll(/<[^>]*>/g, "");

it("an outcome that did not come in time is unknown, and how to get it is said", () => {
  expect(text({ status: "verifying" })).toBe("Not known yet: the coordinator is still reading after 30 m. Press Verify again for the outcome.");
});

it("of many corrupted ranges only some are listed; the count is of all", () => {
  const damage = { path: "/c", reason: "checksum differs", start_bytes: 0, end_bytes: 1, tensors: [] };
  expect(text({ status: "damaged", reason: "1,234 corrupted ranges", damages: [damage] })).toContain("1,234 corrupted ranges");
});
