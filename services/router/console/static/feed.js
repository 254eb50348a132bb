// Keeps what the router tells this page over one stream of server-sent events, and tells views when it changes.
//
// It asks for nothing while the page is hidden. All times are the router's: `now()` is the router's clock, by what the
// newest message said and how long ago that was.

import { useEffect, useState } from "./vendor/htm-preact.js";

const MOST_REQUESTS = 4096;
const MOST_SECONDS = 900;
const AGAIN_AFTER_MS = 2000;
const HIDDEN_FOR_MS = 30_000;

export const feed = {
  hello: null,
  state: null,
  workers: new Map(),
  pairs: new Map(),
  requests: new Map(),
  // Of each second: {at, itl: {buckets_ms, split, unsplit}, output_tokens_per_s}
  seconds: [],
  // "connecting", "live" or "lost"
  connection: "connecting",
  now: () => Date.now() / 1000 - clockAhead,
};

let clockAhead = 0;
let source = null;
let waiting = null;
let hiding = null;
let isDrawing = false;
const readers = new Set();

// Draws the view again whenever the feed has changed.
export function useFeed() {
  const [, draw] = useState(0);
  useEffect(() => {
    const reader = () => draw((times) => times + 1);
    readers.add(reader);
    return () => readers.delete(reader);
  }, []);
  return feed;
}

// The newest detail of one request (`/console/requests/NUMBER`): asked for once a second until it has ended.
export function useDetail(number) {
  const [answer, set] = useState({ number: null, detail: null, problem: null });
  useEffect(() => {
    let isOver = number === null || number === undefined;
    let timer = null;
    const ask = async () => {
      try {
        const response = await fetch(`/console/requests/${number}`);
        if (response.status === 401) return location.reload();
        if (isOver) return undefined;
        if (response.status === 404) return set({ number, detail: null, problem: 404 });
        if (!response.ok) throw new Error(`${response.status}`);
        const detail = await response.json();
        if (isOver) return undefined;
        set({ number, detail, problem: null });
        if (detail.row.phase === "ended") return undefined;
      } catch {
        if (isOver) return undefined;
        set((before) => ({ number, detail: before.number === number ? before.detail : null, problem: "lost" }));
      }
      timer = setTimeout(ask, 1000);
      return undefined;
    };
    if (!isOver) ask();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [number]);
  return answer.number === number ? answer : { detail: null, problem: null };
}

export function start() {
  open();
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(close, HIDDEN_FOR_MS);
    else if (!source) open();
  });
}

function open() {
  close();
  source = new EventSource("/console/events");
  source.addEventListener("hello", (event) => greet(JSON.parse(event.data)));
  source.addEventListener("state", (event) => absorb(JSON.parse(event.data)));
  source.addEventListener("requests", (event) => absorbRequests(JSON.parse(event.data)));
  source.addEventListener("error", lose);
}

function close() {
  clearTimeout(waiting);
  source?.close();
  source = null;
}

// A browser connects again by itself, but not if it was answered by an error.
async function lose() {
  feed.connection = "lost";
  changed();
  if (source?.readyState !== EventSource.CLOSED) return;
  close();
  waiting = setTimeout(open, AGAIN_AFTER_MS);
  const answer = await fetch("/console/requests/0").catch(() => null);
  if (answer?.status === 401) location.reload();
}

function greet(hello) {
  const isOther = feed.hello?.incarnation !== hello.incarnation;
  // Of those that live, all are told again: the end of the others came while this page did not look.
  for (const [number, row] of feed.requests) if (isOther || row.phase !== "ended") feed.requests.delete(number);
  // What came before this page looked, or while it did not.
  feed.seconds = (hello.itl_before ?? []).map(({ at, itl }) => ({ at, itl, output_tokens_per_s: null }));
  feed.hello = hello;
  feed.workers.clear();
  feed.pairs.clear();
  feed.connection = "live";
  clockAhead = Date.now() / 1000 - hello.at;
  changed();
}

function absorb(state) {
  feed.state = state;
  clockAhead = Date.now() / 1000 - state.at;
  for (const worker of state.workers) feed.workers.set(worker.id, worker);
  for (const id of state.gone) feed.workers.delete(id);
  for (const pair of state.pairs) feed.pairs.set(pairKey(pair.prefill, pair.decode), pair);
  for (const [prefill, decode] of state.pairs_gone) feed.pairs.delete(pairKey(prefill, decode));
  feed.seconds.push({ at: state.at, itl: state.itl ?? null, output_tokens_per_s: state.output_tokens_per_s });
  if (feed.seconds.length > MOST_SECONDS) feed.seconds.shift();
  changed();
}

function absorbRequests({ requests }) {
  for (const row of requests) {
    feed.requests.set(row.number, row);
  }
  if (feed.requests.size > MOST_REQUESTS) {
    const oldest = [...feed.requests.keys()].sort((one, other) => one - other);
    for (const number of oldest.slice(0, feed.requests.size - MOST_REQUESTS)) feed.requests.delete(number);
  }
  changed();
}

export function pairKey(prefill, decode) {
  return JSON.stringify([prefill, decode]);
}

// Requests, the newest first.
export function newest() {
  return [...feed.requests.values()].sort((one, other) => other.number - one.number);
}

function changed() {
  if (isDrawing) return;
  isDrawing = true;
  setTimeout(() => {
    isDrawing = false;
    for (const reader of readers) reader();
  }, 50);
}
