// The request with the fewest prompt tokens left to compute goes first.

export const lifecycle = {
  describe: () => ({
    name: "{{name}}",
    version: "0.1.0",
    summary: "Fewest prompt tokens to compute first: lowers mean TTFT, delays long prompts.",
  }),
  init(slot, targets, configJson) {
    if (Object.keys(JSON.parse(configJson)).length > 0) throw "config: this policy takes no options";
  },
  // This policy keeps no state of requests.
  finished(requests) {},
  snapshot: () => new Uint8Array(),
  restore(state) {},
};

export const dispatch = {
  inputs: () => ["prompt-tokens", "cached-tokens"],
  decide(step, candidates, columns) {
    const keys = new Float32Array(candidates);
    // Lower goes first; the host sorts.
    for (let i = 0; i < candidates; i++) keys[i] = columns[i] - columns[candidates + i];
    return { keys, tokenBudget: undefined, tokenCaps: [], victimKeys: [] };
  },
};
