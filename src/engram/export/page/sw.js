// Keeps every file of the page, so that it works without a network once it was loaded.
const SITE = /* replaced by the export */ { version: "", shell: [], runtime: "", policy: "" };
const PREFIX = `engram ${self.registration.scope} `;
const NAME = PREFIX + SITE.version;

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(NAME).then((cache) => cache.addAll(SITE.shell)).then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  const clear = async () => {
    for (const name of await caches.keys()) if (name.startsWith(PREFIX) && name !== NAME) await caches.delete(name);
    await self.clients.claim();
  };
  event.waitUntil(clear());
});

self.addEventListener("fetch", (event) => {
  const { request } = event;
  const own = request.url.startsWith(self.registration.scope) || (SITE.runtime && request.url.startsWith(SITE.runtime));
  if (request.method === "GET" && own) event.respondWith(respond(request));
});

async function respond(request) {
  const cache = await caches.open(NAME);
  let response = await cache.match(request, { ignoreSearch: true, ignoreVary: true });
  if (!response) {
    response = await fetch(request);
    if (response.status === 200) await cache.put(request, response.clone());
  }
  if (!request.url.startsWith(self.registration.scope) || response.type === "opaque" || response.redirected) return response;
  // The policy holds for the worker, too. Isolated from other sites, the page may use threads.
  const headers = new Headers(response.headers);
  headers.set("Content-Security-Policy", SITE.policy);
  headers.set("Cross-Origin-Opener-Policy", "same-origin");
  headers.set("Cross-Origin-Embedder-Policy", "require-corp");
  headers.set("Cross-Origin-Resource-Policy", "same-origin");
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}
