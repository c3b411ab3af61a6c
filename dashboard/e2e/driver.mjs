/**
 * A browser driven by JSON commands, one per line; each gets a one-line response. The caller controls everything else:
 * kills workers, stops coordinators, waits.
 *
 *   {"n": 1, "op": "open", "url": "http://127.0.0.1:3000/"}     →     {"n": 1, "value": null}
 *   {"n": 2, "op": "see", "find": {"role": "alert"}}            →     {"n": 2, "error": "…"}
 */

import { createInterface } from "node:readline";

import { AxeBuilder } from "@axe-core/playwright";
import { chromium } from "playwright-core";

const TIMEOUT_MS = 45_000;
/** On a busy machine it takes long until the browser's processes are there. */
const START_TIMEOUT_MS = 120_000;
const settings = JSON.parse(process.argv[2] ?? "{}");

const browser = await chromium.launch({
  timeout: START_TIMEOUT_MS,
  executablePath: settings.chromium ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb"],
});
const context = await browser.newContext({
  viewport: settings.viewport ?? { width: 1440, height: 900 },
  deviceScaleFactor: settings.scale ?? 1,
  acceptDownloads: true,
  reducedMotion: "reduce",
});
context.setDefaultTimeout(TIMEOUT_MS);
await context.addInitScript(() => {
  window.longTasks = [];
  window.violations = [];
  document.addEventListener("securitypolicyviolation", (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) window.longTasks.push(entry.duration);
  }).observe({ type: "longtask", buffered: true });
});
const page = await context.newPage();
const complaints = [];
page.on("console", (message) => {
  if (message.type() === "error") complaints.push(message.text());
});
const refusals = [];
page.on("response", (response) => {
  if (response.status() >= 400) refusals.push(`${response.status()} ${response.url()}`);
});
page.on("pageerror", (error) => complaints.push(`uncaught: ${error.message}`));
page.on("dialog", (dialog) => {
  complaints.push(`dialog: ${dialog.message()}`);
  void dialog.dismiss();
});

/** A locator by role and name, label, text or CSS. */
function place({ role, name, label, text, css, exact = false, nth = 0, inside }) {
  const root = inside ? place(inside) : page;
  const found = css
    ? root.locator(css, text === undefined ? {} : { hasText: text })
    : label !== undefined
      ? root.getByLabel(label, { exact })
      : role
        ? root.getByRole(role, name === undefined ? {} : { name, exact })
        : root.getByText(text, { exact });
  return nth === null ? found : found.nth(nth);
}

const ops = {
  open: ({ url }) => page.goto(url, { waitUntil: "load" }).then(() => null),
  reload: () => page.reload({ waitUntil: "load" }).then(() => null),
  click: ({ find }) => place(find).click(),
  // Moves over an element from point to point, each as fractions of its width and height; with the button pressed, or with a final double click.
  mouse: async ({ find, points, held = false, twice = false }) => {
    const target = place(find);
    await target.scrollIntoViewIfNeeded();
    const { x, y, width, height } = await target.boundingBox();
    const at = points.map(([across, down]) => [x + across * width, y + down * height]);
    await page.mouse.move(...at[0]);
    if (held) await page.mouse.down();
    for (const point of at.slice(1)) await page.mouse.move(...point, { steps: 4 });
    if (held) await page.mouse.up();
    if (twice) await page.mouse.dblclick(...at.at(-1));
  },
  hold: async ({ find }) => {
    await place(find).hover();
    await page.mouse.down();
  },
  release: () => page.mouse.up(),
  drag: ({ find, onto }) => place(find).dragTo(place(onto)),
  fill: ({ find, value }) => place(find).fill(value),
  choose: ({ find, value }) => place(find).selectOption(value).then(() => null),
  // All keys are sent before the first is handled, so that key sequences arrive in time.
  press: ({ keys }) => Promise.all(keys.map((key) => page.keyboard.press(key))).then(() => null),
  settle: () => page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))).then(() => null),
  see: ({ find, timeout_ms }) => place(find).waitFor({ state: "visible", timeout: timeout_ms ?? TIMEOUT_MS }),
  miss: ({ find, timeout_ms }) => place(find).waitFor({ state: "hidden", timeout: timeout_ms ?? TIMEOUT_MS }),
  count: ({ find }) => place({ ...find, nth: null }).count(),
  text: ({ find }) => place(find).innerText(),
  texts: ({ find }) => place({ ...find, nth: null }).allInnerTexts(),
  value: ({ find }) => place(find).inputValue(),
  url: () => page.url(),
  evaluate: ({ script }) => page.evaluate(script),
  // Polled from outside: the content security policy forbids evaluating text inside the page.
  until: async ({ script, timeout_ms }) => {
    const endMs = Date.now() + (timeout_ms ?? TIMEOUT_MS);
    while (!(await page.evaluate(script))) {
      if (Date.now() > endMs) throw new Error("it did not become true in time");
      await page.waitForTimeout(50);
    }
  },
  theme: async ({ dark }) => {
    await page.emulateMedia({ colorScheme: dark ? "dark" : "light", reducedMotion: "reduce" });
    // Colours transition over a frame or two.
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 150)))));
    return null;
  },
  size: ({ width, height }) => page.setViewportSize({ width, height }),
  picture: ({ path }) => page.screenshot({ path, animations: "disabled" }).then(() => null),
  download: async ({ find, path }) => {
    const [file] = await Promise.all([page.waitForEvent("download"), place(find).click()]);
    await file.saveAs(path);
    return file.suggestedFilename();
  },
  axe: async ({ rules = [] }) => {
    // There are no frames: legacy mode needs no second page.
    const builder = new AxeBuilder({ page }).setLegacyMode(true);
    if (rules.length > 0) builder.withRules(rules);
    else builder.withTags(["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]);
    const { violations } = await builder.analyze();
    return violations.map(({ id, impact, nodes }) => ({ id, impact, nodes: nodes.slice(0, 5).map((node) => `${node.target.join(" ")}: ${node.failureSummary ?? ""}`) }));
  },
  complaints: () => complaints.splice(0),
  refusals: () => refusals.splice(0),
  allow: ({ permission, origin }) => context.grantPermissions([permission], { origin }),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { n, op, ...rest } = JSON.parse(line);
  let answer;
  try {
    answer = { n, value: (await ops[op](rest)) ?? null };
  } catch (error) {
    answer = { n, error: String(error.message ?? error) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await browser.close();
