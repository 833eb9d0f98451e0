// Long thoughts end while other requests wait.

const LONG_TOKENS = 2048;
const QUEUE = 8;

export const lifecycle = {
  describe: () => ({
    name: "{{name}}",
    version: "0.1.0",
    summary: "Ends thoughts of more than 2048 tokens while more than 8 requests wait.",
  }),
  init(slot, targets, configJson) {
    if (Object.keys(JSON.parse(configJson)).length > 0) throw "config: this policy takes no options";
  },
  // This policy keeps no state of requests.
  finished(requests) {},
  snapshot: () => new Uint8Array(),
  restore(state) {},
};

export const budget = {
  inputs: () => ["think-tokens"],
  // An empty list stands for the configured thresholds.
  start: (load, candidates, columns) => [],
  probe(load, candidates, columns) {
    const isBusy = load.waiting > QUEUE;
    return Array.from(columns, (tokens) => (isBusy && tokens > LONG_TOKENS ? "end-now" : "default"));
  },
};
