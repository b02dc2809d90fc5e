// node perfetto_reader.js FOLDER < requests > replies: Perfetto's reader of traces, started as its page starts it in a
// worker of a browser. FOLDER holds engine_bundle.js and its wasm; requests and replies are TraceProcessorRpcStreams.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const read = (url) => fs.readFileSync(path.join(folder, path.basename(url)));

// What a worker of a browser has around it.
class XMLHttpRequest {
  open(method, url) {
    this.url = url;
  }
  send() {
    this.response = read(this.url);
  }
}
const worker = {
  XMLHttpRequest,
  WorkerGlobalScope: Object,
  location: { href: "https://page/engine_bundle.js" },
  console: { log() {}, warn() {}, error: console.error },
  // of this program, whose WebAssembly makes and throws them
  ...{ WebAssembly, Uint8Array, TypeError, URL, TextDecoder, TextEncoder, performance, crypto },
};
worker.self = worker;
vm.runInNewContext(read("engine_bundle.js").toString(), worker);

// The page's end of the channel: requests go in by onmessage, replies come out by postMessage.
const port = { postMessage: (reply) => fs.writeSync(1, reply) };
worker.onmessage({ data: port });
// a timer, since the program is ready only after the promises of its start
setTimeout(() => port.onmessage({ data: fs.readFileSync(0) }));
