//! Step times of the small engines that are simulated in tests.

use meridian_bench::sim::StepModel;

pub const STEP: StepModel = StepModel {
    fixed_ms: 2.0,
    request_ms: 0.05,
    weights_ms: 4.0,
    token_ms: 0.02,
    kv_token_ms: 1e-4,
    attention_ms: 1e-5,
    arrival_ms: 0.0,
    hides_host: false,
};
