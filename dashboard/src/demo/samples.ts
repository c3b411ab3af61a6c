/** Preview samples in demo mode: text with tokens, and small images with labels. */

import { DATASET, PICTURES } from "./simulation";

type Field = Record<string, unknown>;

const SENTENCES = [
  "The lighthouse keeper wrote the weather down every morning, and every evening he compared it with what had come.",
  "A violin's top is spruce because spruce is stiff along the grain and gives across it.",
  "Bread rises twice: once for the yeast, once for the baker.",
  "Rivers meander because the outside of a bend is faster than the inside, and takes the bank with it.",
  "She kept two clocks in the workshop, one right and one fast, and trusted the difference.",
];

export function samplesOf(dataset: string, indices: number[]): Record<string, Field>[] {
  if (dataset === DATASET) return indices.map(textSample);
  if (dataset === PICTURES) return indices.map(pictureSample);
  return [];
}

function textSample(index: number): Record<string, Field> {
  const text = SENTENCES[index % SENTENCES.length]!;
  const tokens = Array.from(text.matchAll(/\s?\w+|[^\w\s]/g), ([word]) => tokenOf(word));
  return {
    tokens: { kind: "list", role: "feature", length: tokens.length, value: tokens, truncated: false },
    text: { kind: "text", role: "feature", value: text, length: text.length, truncated: false },
  };
}

function tokenOf(word: string): number {
  let sum = 0;
  for (const letter of word) sum = (sum * 31 + letter.charCodeAt(0)) % 50_257;
  return sum;
}

const FRUIT = [
  { label: "apple", hue: "#c0392b" },
  { label: "lime", hue: "#7cb342" },
  { label: "plum", hue: "#6c3483" },
  { label: "orange", hue: "#e67e22" },
];

function pictureSample(index: number): Record<string, Field> {
  const fruit = FRUIT[index % FRUIT.length]!;
  const radius = 22 + (index % 7) * 2;
  const svg =
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 96 96"><rect width="96" height="96" fill="#e8e4da"/>` +
    `<ellipse cx="48" cy="82" rx="${radius}" ry="5" fill="#cfc8b8"/><circle cx="48" cy="${80 - radius}" r="${radius}" fill="${fruit.hue}"/></svg>`;
  return {
    __key__: { kind: "text", role: "key", value: `fruit-${String(index).padStart(6, "0")}`, length: 12, truncated: false },
    image: { kind: "image", role: "feature", format: "svg", bytes: svg.length, value: `data:image/svg+xml,${encodeURIComponent(svg)}` },
    label: { kind: "text", role: "label", value: fruit.label, length: fruit.label.length, truncated: false },
  };
}
