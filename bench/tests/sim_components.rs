//! The shipped dispatch policies decide alike natively and as components. Needs the components: `make policies`.

use std::path::Path;

use meridian_bench::policies::{Choice, Loader, Policies, PolicyArg};
use meridian_bench::results::Slo;
use meridian_bench::sim::{Outcome, Simulation, preset};
use meridian_bench::trace::{Generator, Workload};
use meridian_core::MeridianConfig;

const REQUESTS: usize = 400;

fn run(dispatch: &str, requests_per_s: f64) -> Outcome {
    let config = MeridianConfig::from_toml("[model]\nstrips_reasoning = true\n[service_levels.all]\ndefault = true")
        .expect("valid");
    let dispatch: PolicyArg = dispatch.parse().expect("a source");
    let choice = Choice { dispatch, eviction: None, budget: None, inject: None };
    let policies = Policies::load(&mut Loader::new(config), &choice, 1).expect("the policy loads");
    let engine = meridian_bench::sim::EngineConfig {
        kv_blocks: 6000,
        max_num_seqs: 48,
        ..preset::named("7b-h100").expect("a preset")
    };
    let text = "most_generated_tokens = 3000\nclasses = [{ weight = 0.5, priority = 0 }, { weight = 0.5, priority = 1, deadline_ms = 9000.0 }]";
    let workload = Workload { requests_per_s, ..Workload::from_toml(text).expect("valid") };
    let requests = Generator::new(&workload, 3).expect("valid").take(REQUESTS);
    Simulation::new(&engine, vec![policies], Slo::default(), REQUESTS).run(requests, |_| {})
}

#[test]
fn native_and_component_make_the_same_schedule() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/policies");
    let policies = [
        ["balanced", "output-first", "noop", "priority", "pascal", "srpt", "fair-share"].as_slice(),
        &["edf", "qoe", "mlfq", "qoserve", "scorpio", "jitserve", "lpm"],
    ];
    for policy in policies.into_iter().flatten().copied() {
        let (native, component) =
            (run(policy, 4.0), run(&folder.join(format!("{policy}.wasm")).display().to_string(), 4.0));
        assert_eq!(native.digest, component.digest, "{policy}");
        assert!(native.run.metrics == component.run.metrics, "{policy}");
        assert_eq!(native.run.metrics["requests"], REQUESTS as f64, "{policy}");
        assert_eq!(native.run.metrics["decided_by_policy"] > 0.0, policy != "noop", "{policy}");
    }
}
