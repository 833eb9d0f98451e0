//! How long an engine step takes.
//!
//! Each layer of a transformer does two kinds of work. Its matrices are read once a step whatever the batch is, and
//! multiplied with every token: the slower of the two counts (the roofline of Williams et al., CACM 2009; for inference
//! Pope et al., arXiv 2211.05102, section 2). Attention reads the KV of each request's context, and in a prefill multiplies
//! every new token with every token before it. What remains is the engine's own: a launch, and some time for each request.
//! With asynchronous scheduling, vLLM's default on GPUs, the engine prepares a step while the device computes the one
//! before: the slower of the two counts. Sizes of CUDA graphs are left out: a batch is padded to a size at most a few percent
//! above it.

use std::collections::BTreeMap;

/// Parameters of the step time, all in milliseconds.
///
/// `host = fixed + request * requests`, `device = max(weights, token * tokens) + kv * context + attention * pairs`; a step
/// takes their sum, or with asynchronous scheduling the longer of them.
///
/// ```
/// use meridian_bench::sim::{StepModel, StepWork};
///
/// let model = StepModel { fixed_ms: 2.0, weights_ms: 6.0, token_ms: 0.02, ..StepModel::default() };
/// let decodes = StepWork { requests: 100, tokens: 100, context_tokens: 200_000, attention_pairs: 0 };
/// assert_eq!(model.step_ms(&decodes), 8.0, "a hundred decodes wait for the weights");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepModel {
    /// Whatever the step carries: launching it, scheduling, sampling.
    pub fixed_ms: f64,
    /// For each request in the step.
    pub request_ms: f64,
    /// Reading the weights once; hidden by computing when the step carries many tokens.
    pub weights_ms: f64,
    /// Computing one token in all layers.
    pub token_ms: f64,
    /// Reading the KV of one token of context.
    pub kv_token_ms: f64,
    /// Attention of one token of a prompt to one token before it.
    pub attention_ms: f64,
    /// Taking in a request that arrives.
    pub arrival_ms: f64,
    /// Asynchronous scheduling: the device does not wait for the host.
    pub hides_host: bool,
}

/// What one step does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Requests that are given tokens.
    pub requests: u32,
    /// Tokens of the step.
    pub tokens: u32,
    /// Tokens of context whose KV is read: of every request in the step, those computed before.
    pub context_tokens: u64,
    /// Pairs of a new token of a prompt and a token it attends to.
    pub attention_pairs: u64,
}

impl StepWork {
    /// Count a request that computes `tokens` after `computed` tokens.
    pub fn add(&mut self, computed: u32, tokens: u32) {
        self.requests += 1;
        // A recording may claim anything.
        self.tokens = self.tokens.saturating_add(tokens);
        self.context_tokens += u64::from(computed);
        if tokens > 1 {
            let (computed, tokens) = (u64::from(computed), u64::from(tokens));
            self.attention_pairs += tokens * computed + tokens * (tokens + 1) / 2;
        }
    }
}

impl StepModel {
    /// Names of the parameters, in the order of [`StepModel::values`].
    pub const NAMES: [&'static str; 7] =
        ["fixed_ms", "request_ms", "weights_ms", "token_ms", "kv_token_ms", "attention_ms", "arrival_ms"];

    /// Milliseconds that a step computes: its operations at the speed of the device.
    #[must_use]
    pub fn compute_ms(&self, work: &StepWork) -> f64 {
        self.token_ms * f64::from(work.tokens) + self.attention_ms * work.attention_pairs as f64
    }

    /// Milliseconds of a step.
    #[must_use]
    pub fn step_ms(&self, work: &StepWork) -> f64 {
        let host_ms = self.fixed_ms + self.request_ms * f64::from(work.requests);
        let device_ms = self.weights_ms.max(self.token_ms * f64::from(work.tokens))
            + self.kv_token_ms * work.context_tokens as f64
            + self.attention_ms * work.attention_pairs as f64;
        if self.hides_host { host_ms.max(device_ms) } else { host_ms + device_ms }
    }

    /// The parameters.
    #[must_use]
    pub fn values(&self) -> [f64; 7] {
        let Self { fixed_ms, request_ms, weights_ms, token_ms, kv_token_ms, attention_ms, arrival_ms, .. } = *self;
        [fixed_ms, request_ms, weights_ms, token_ms, kv_token_ms, attention_ms, arrival_ms]
    }

    /// From the parameters in the order of [`StepModel::NAMES`], without asynchronous scheduling.
    #[must_use]
    pub fn from_values(values: [f64; 7]) -> Self {
        let [fixed_ms, request_ms, weights_ms, token_ms, kv_token_ms, attention_ms, arrival_ms] = values;
        let hides_host = false;
        Self { fixed_ms, request_ms, weights_ms, token_ms, kv_token_ms, attention_ms, arrival_ms, hides_host }
    }

    /// By name.
    #[must_use]
    pub fn by_name(&self) -> BTreeMap<String, f64> {
        Self::NAMES.iter().map(|name| (*name).to_owned()).zip(self.values()).collect()
    }

    /// What a request would take alone in the engine: one step for its prompt (in chunks of `chunk` tokens), then one for
    /// each further token.
    #[must_use]
    pub fn alone_ms(&self, prompt_tokens: u32, generated_tokens: u32, chunk: u32) -> f64 {
        let chunk = chunk.max(1);
        let mut total = self.arrival_ms;
        let mut computed = 0;
        while computed < prompt_tokens {
            let tokens = chunk.min(prompt_tokens - computed);
            let mut work = StepWork::default();
            work.add(computed, tokens);
            total += self.step_ms(&work);
            computed += tokens;
        }
        let decodes = f64::from(generated_tokens.saturating_sub(1));
        let mean_context = f64::from(prompt_tokens) + decodes / 2.0;
        let one = StepWork { requests: 1, tokens: 1, ..StepWork::default() };
        let one = StepWork { context_tokens: mean_context as u64, ..one };
        total + decodes * self.step_ms(&one)
    }
}
