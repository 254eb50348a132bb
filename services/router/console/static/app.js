// The page: its heading, which view is shown (by the hash), the connection to the router, and light or dark.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { Cluster } from "./cluster.js";
import { start, useFeed } from "./feed.js";
import { Name, command, jaegerLink } from "./format.js";
import { Latency } from "./latency.js";
import { Playground } from "./playground.js";
import { Request } from "./request.js";
import { Requests } from "./requests.js";

const VIEWS = { cluster: "Cluster", requests: "Requests", latency: "Latency", playground: "Playground" };

function App() {
  const feed = useFeed();
  const [[view, argument], go] = useState(readHash());
  const main = useRef(null);
  const isFirst = useRef(true);
  useEffect(() => {
    const follow = () => go(readHash());
    window.addEventListener("hashchange", follow);
    return () => window.removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    document.title = `${VIEWS[view]}${argument ? ` ${argument}` : ""} · Baton`;
    // Whoever reads by ear or by keys goes on at what is new.
    if (!isFirst.current) {
      main.current.focus({ preventScroll: true });
      window.scrollTo(0, 0);
    }
    isFirst.current = false;
  }, [view, argument]);
  return html`<a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), main.current.focus())}
      >Skip to the content</a
    >
    <header>
      <a class="brand" href="#cluster"><img src="/console/icon.svg" alt="" width="22" height="22" /> Baton</a>
      <nav aria-label="Views">
        ${Object.entries(VIEWS).map(
          ([name, words]) =>
            html`<a key=${name} href=${`#${name}`} aria-current=${name === view ? "page" : null}>${words}</a>`,
        )}
      </nav>
      <${Connection} feed=${feed} />
      <${Theme} />
    </header>
    <main id="main" tabindex="-1" ref=${main}>${shown(view, argument, feed)}</main>
    <footer>${feed.hello && html`<${About} router=${feed.hello.router} />`}</footer>`;
}

function shown(view, argument, feed) {
  if (!feed.hello || !feed.state) return html`<p class="loading">Waiting for the router …</p>`;
  if (view === "requests" && argument) return html`<${Request} number=${Number(argument)} feed=${feed} />`;
  if (view === "requests") return html`<${Requests} feed=${feed} />`;
  if (view === "latency") return html`<${Latency} feed=${feed} />`;
  if (view === "playground") return html`<${Playground} feed=${feed} />`;
  return html`<${Cluster} feed=${feed} />`;
}

function readHash() {
  const [view, argument] = location.hash.slice(1).split("/");
  if (!(view in VIEWS)) return ["cluster", null];
  return [view, view === "requests" && /^\d{1,15}$/.test(argument ?? "") ? argument : null];
}

function Connection({ feed }) {
  const words = {
    connecting: ["◌", "connecting"],
    live: ["●", "live"],
    lost: ["✕", "connection lost: what is shown is old; trying again"],
  };
  const [sign, text] = words[feed.connection];
  return html`<p class=${`connection connection-${feed.connection}`} role="status">
    <span aria-hidden="true">${sign}</span> ${text}
  </p>`;
}

function Theme() {
  const root = document.documentElement;
  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const [dark, set] = useState(isDark());
  const toggle = () => {
    root.dataset.theme = dark ? "light" : "dark";
    try {
      localStorage.setItem("baton-theme", root.dataset.theme);
    } catch {
      // It lasts as long as the page does.
    }
    set(!dark);
    window.dispatchEvent(new Event("baton-theme"));
  };
  return html`<button type="button" class="theme" aria-pressed=${String(dark)} onClick=${toggle} title="Light or dark">
    <span aria-hidden="true">${dark ? "☾" : "☀"}</span><span class="hear">Dark colours</span>
  </button>`;
}

function About({ router }) {
  return html`Baton ${router.version} · router process ${router.pid} · gRPC${" "}
    <code><${Name} text=${router.grpc} /></code> · ${router.tls ? "HTTPS" : "HTTP"}${" "}<code><${Name} text=${router.http} /></code>${
      router.jaeger &&
      html` · <a href=${jaegerLink(router.jaeger, "/search?service=baton-router")} rel="noreferrer">Jaeger</a>`
    }
    ${" "}· in a terminal: <code><${Name} text=${command("top", router)} /></code>`;
}

const root = document.getElementById("app");
root.textContent = "";
start();
render(html`<${App} />`, root);
