// Writes numbers, sizes and names as people read them.

import { html } from "./vendor/htm-preact.js";
import { duration, visible } from "./waterfall.js";

export { duration, visible };

export const NOTHING = "–";

// Text of unknown origin: shown as what it is, and kept from turning what stands around it.
export function Name({ text, keep }) {
  return html`<bdi>${visible(text, keep)}</bdi>`;
}

export function count(number) {
  return number === null || number === undefined ? NOTHING : Math.round(number).toLocaleString("en");
}

export function rate(number) {
  if (number === null || number === undefined) return NOTHING;
  return number >= 100 ? count(number) : Number(number.toFixed(1)).toLocaleString("en");
}

export function bytes(number) {
  if (number === null || number === undefined) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (let rest = number; rest >= 1024 && power < units.length - 1; rest /= 1024) power += 1;
  return `${power ? (number / 1024 ** power).toFixed(1) : number} ${units[power]}`;
}

export function share(part, whole) {
  if (!whole) return NOTHING;
  const percent = (100 * part) / whole;
  return percent > 0 && percent < 1 ? "< 1 %" : percent > 99 && percent < 100 ? "> 99 %" : `${Math.round(percent)} %`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// How a latency stands to its objective, as the router grades it: "met", "near" or "missed"; "" without an objective.
export function graded(ms, objective, near) {
  if (!objective) return "";
  return ms > objective ? "missed" : ms > near * objective ? "near" : "met";
}

// Age of what happened at `at` (Unix seconds), as the router's clock has it.
export function ago(at, now) {
  const seconds = Math.max(0, now - at);
  if (seconds < 2) return "now";
  if (seconds < 120) return `${Math.round(seconds)} s ago`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

// A command for a terminal on the router's machine; `baton` asks this address unless it is told another.
export function command(words, { control }) {
  return control === "127.0.0.1:50052" ? `baton ${words}` : `baton ${words} --target ${control}`;
}

export function joined(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

// An address of another kind than the web's would run as a script.
export function jaegerLink(base, path) {
  return /^https?:\/\//.test(base) ? `${base.replace(/\/+$/, "")}${path}` : null;
}
