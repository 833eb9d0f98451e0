// Blocks that were never matched again go first, the end of a chain before its head.

export const lifecycle = {
  describe: () => ({
    name: "{{name}}",
    version: "0.1.0",
    summary: "Blocks with few matches and far from the head of their chain go first.",
  }),
  init(slot, targets, configJson) {
    if (Object.keys(JSON.parse(configJson)).length > 0) throw "config: this policy takes no options";
  },
  // This policy keeps no state of requests.
  finished(requests) {},
  snapshot: () => new Uint8Array(),
  restore(state) {},
};

export const eviction = {
  inputs: () => ["hits", "position"],
  rank(memory, candidates, columns) {
    const keys = new Float32Array(candidates);
    // Lower goes first; the host sorts.
    for (let i = 0; i < candidates; i++) keys[i] = columns[i] - columns[candidates + i];
    // No block is kept for a time.
    return { keys, keepMs: [] };
  },
};
