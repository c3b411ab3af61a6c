import { renderToStaticMarkup } from "react-dom/server";
import { expect, it } from "vitest";

import { Ladder } from "./Ladder";

const chips = (...tiers: string[]) => [...renderToStaticMarkup(<Ladder tiers={tiers} status="completed" />).matchAll(/>([^<>]+)</g)].map(([, text]) => text);

it("names every tier, also several of one rung, and the rungs without one", () => {
  expect(chips("MEMORY", "NVME", "S3")).toEqual(["Memory", "NVME", "S3"]);
  expect(chips("MEMORY", "PEER", "NVME", "LOCAL")).toEqual(["Memory + Peer", "NVME + Disk", "Bucket"]);
  expect(chips("S3", "GCS")).toEqual(["Memory", "Disk", "S3 + GCS"]);
});
