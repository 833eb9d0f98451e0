//! What does a simulated engine step cost, and what do the host's decisions and WebAssembly add to it?
//!
//! A run of 64 requests that decode, a few thousand steps: stock (nobody decides), the host without a policy (`noop`, the
//! default decides), `output-first` natively and as a component. Divide two of them for a ratio; `make figures
//! ONLY=measured PART=speed` prints those of longer runs, in turns. Needs the components: `make policies`.

use std::path::Path;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use meridian_bench::policies::{Choice, Loader, Policies, PolicyArg};
use meridian_bench::results::Slo;
use meridian_bench::sim::{EngineConfig, Outcome, Simulation, preset};
use meridian_bench::trace::TraceRequest;
use meridian_core::MeridianConfig;

const REQUESTS: u32 = 64;

fn run(engine: &EngineConfig, policies: Policies) -> Outcome {
    let request = |i: u32| TraceRequest {
        prompt_tokens: 64,
        think_tokens: 900 + i % 7,
        output_tokens: 100 + i % 5,
        ..TraceRequest::default()
    };
    Simulation::new(engine, vec![policies], Slo::default(), REQUESTS as usize).run((0..REQUESTS).map(request), |_| {})
}

fn steps(c: &mut Criterion) {
    let engine =
        EngineConfig { max_num_seqs: REQUESTS, kv_blocks: 8192, ..preset::named("7b-h100").expect("a preset") };
    let component = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/policies/output-first.wasm");
    let mut loader = Loader::new(MeridianConfig::default());
    let mut policies = |name: &str| {
        let dispatch: PolicyArg = name.parse().expect("a source");
        let choice = Choice { dispatch, eviction: None, budget: None, inject: None };
        Policies::load(&mut loader, &choice, 1).expect("the policy loads")
    };
    let mut group = c.benchmark_group("simulated steps, 64 running");
    let component = component.display().to_string();
    for (name, source) in [
        ("stock", "fcfs"),
        ("default", "noop"),
        ("output-first native", "output-first"),
        ("output-first component", component.as_str()),
    ] {
        let count = run(&engine, policies(source)).steps;
        group.throughput(Throughput::Elements(count));
        group.bench_function(name, |b| {
            b.iter_batched(|| policies(source), |p| run(&engine, p), criterion::BatchSize::PerIteration)
        });
    }
    group.finish();
}

criterion_group! {
    name = simulator;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(4));
    targets = steps
}
criterion_main!(simulator);
