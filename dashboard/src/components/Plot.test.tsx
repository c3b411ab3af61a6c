// @vitest-environment happy-dom

import { act } from "react";
import { createRoot } from "react-dom/client";
import { expect, it } from "vitest";

import { Plot } from "./Plot";

it("without a canvas to draw on, the last values are shown as text", async () => {
  Object.assign(globalThis, { IS_REACT_ACT_ENVIRONMENT: true });
  expect(document.createElement("canvas").getContext("2d")).toBeNull();
  const host = document.body.appendChild(document.createElement("div"));
  const root = createRoot(host);
  await act(async () => root.render(<Plot label="Loss" times={[1, 2]} lines={[{ label: "loss", color: "accent", values: [3, 2.5] }]} />));
  await new Promise((done) => setTimeout(done)); // A plot draws after its construction.
  expect(host.querySelector("figcaption")?.textContent).toContain("2.5");
  await act(async () => root.unmount());
});
