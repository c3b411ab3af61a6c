// @vitest-environment happy-dom
import { beforeEach, describe, expect, it } from "vitest";

import { EMPTY, load, moved, panelsOf, PANELS_SHOWN, parsed, save, togglePin, usualOrder, withoutPanel, withPanel } from "./layout";

const NAMES = ["lr", "system/cpu_percent", "eval/loss", "loss", "accuracy"];

describe("panels", () => {
  it("start with the loss and end with system metrics", () => {
    expect(usualOrder(NAMES)).toEqual(["loss", "eval/loss", "accuracy", "lr", "system/cpu_percent"]);
    expect(panelsOf(NAMES, EMPTY)).toEqual(usualOrder(NAMES));
  });

  it("are removed, added and pinned", () => {
    const without = withoutPanel(togglePin(EMPTY, "lr"), "lr");
    expect(panelsOf(NAMES, without)).not.toContain("lr");
    expect(without.pinned).toEqual([]);
    expect(panelsOf(NAMES, withPanel(without, "lr"))[0]).toBe("lr");
    const pinned = togglePin(EMPTY, "accuracy");
    expect(panelsOf(NAMES, pinned)[0]).toBe("accuracy");
    expect(togglePin(pinned, "accuracy").pinned).toEqual([]);
  });

  it("move to the position of another, pinned ones among themselves", () => {
    const shown = panelsOf(NAMES, EMPTY);
    const after = moved(EMPTY, shown, "lr", "loss");
    expect(panelsOf(NAMES, after)).toEqual(["lr", "loss", "eval/loss", "accuracy", "system/cpu_percent"]);
    expect(panelsOf([...NAMES, "new"], after)).toContain("new");
    const later = moved(EMPTY, shown, "loss", "accuracy");
    expect(panelsOf(NAMES, later)).toEqual(["eval/loss", "accuracy", "loss", "lr", "system/cpu_percent"]);
    const pinned = togglePin(togglePin(EMPTY, "loss"), "lr");
    expect(moved(pinned, panelsOf(NAMES, pinned), "lr", "loss").pinned).toEqual(["lr", "loss"]);
    expect(moved(pinned, panelsOf(NAMES, pinned), "lr", "accuracy")).toBe(pinned);
  });

  it("are limited per page, unless requested", () => {
    const many = Array.from({ length: 500 }, (_, i) => `m${i}`);
    expect(panelsOf(many, EMPTY)).toHaveLength(PANELS_SHOWN);
    expect(panelsOf(many, withPanel(EMPTY, "m499"))[0]).toBe("m499");
  });
});

describe("the stored layout", () => {
  beforeEach(() => localStorage.clear());

  it("is for all runs, or for one", () => {
    expect(load("a")).toEqual({ scope: "all", layout: EMPTY });
    save("a", "all", togglePin(EMPTY, "loss"));
    expect(load("b").layout.pinned).toEqual(["loss"]);
    save("a", "run", togglePin(EMPTY, "lr"));
    expect(load("a")).toEqual({ scope: "run", layout: togglePin(EMPTY, "lr") });
    expect(load("b").layout.pinned).toEqual(["loss"]);
    save("a", "run", null);
    expect(load("a").scope).toBe("all");
  });

  it("is ignored when invalid", () => {
    expect(parsed("{")).toBeNull();
    expect(parsed("5")).toBeNull();
    expect(parsed('{"order": [1, "a"], "pinned": "x"}')).toEqual({ order: ["a"], removed: [], pinned: [] });
  });
});
