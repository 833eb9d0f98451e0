//! What does one decision cost, and what does WebAssembly add to it?
//!
//! A decision is timed as the engine makes it: columns built from the mirror, the policy called, the answer checked, the
//! host's sort and guards. Native and WebAssembly run in turn in one process, each pair gives a ratio, and the median
//! ratio is reported with its quartiles: this survives a noisy machine where two separate timings do not.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use meridian_core::types::RequestId;
use meridian_core::{
    Batch, Decision, EngineFacts, Markers, MeridianConfig, NewRequest, Policy, SchedulerConfig, Slot, Step,
};
use meridian_runtime::{DispatchEngine, DispatchSlot, native};
use meridian_wasm::{Limits, Runtime};
use serde::Serialize;

/// Pairs of timings for each size; each side runs for about [`SAMPLE`].
const PAIRS: usize = 41;
const SAMPLE: Duration = Duration::from_millis(8);

/// The measurements of one run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Median nanoseconds of a call into a component that decides nothing.
    pub noop_call_ns: f64,
    /// One row a batch size.
    pub rows: Vec<Row>,
}

/// One batch size.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Candidates a step.
    pub candidates: usize,
    /// Median nanoseconds of a native decision.
    pub native_ns: f64,
    /// Median nanoseconds of a WebAssembly decision.
    pub wasm_ns: f64,
    /// Median of the paired ratios, WebAssembly over native.
    pub ratio: f64,
    /// Lower quartile of the paired ratios.
    pub ratio_low: f64,
    /// Upper quartile of the paired ratios.
    pub ratio_high: f64,
}

/// Time `policy` against `native:output-first` at each batch size, and `noop`'s bare call.
///
/// # Errors
/// A component does not load, or faults.
pub fn run(policy: &Path, noop: &Path, candidates: &[usize], progress: &mut dyn FnMut(&str)) -> anyhow::Result<Report> {
    let config = MeridianConfig::default();
    let targets = config.scheduler.targets();
    let runtime = Runtime::new(None)?;
    let load = |path: &Path| -> anyhow::Result<Box<dyn Policy>> {
        let component =
            runtime.load_file(path).with_context(|| format!("{} (`make policies` builds it)", path.display()))?;
        Ok(Box::new(component.dispatch_policy(Limits::UNHURRIED, targets, "{}")?))
    };
    progress("no-op call");
    let noop_call_ns = noop_call(load(noop)?.as_mut())?;
    let mut rows = Vec::new();
    for &n in candidates {
        progress(&format!("{n} candidates"));
        let mut native = Bench::new(native::policy("output-first", targets, "{}")?, &config.scheduler, n);
        let mut wasm = Bench::new(load(policy)?, &config.scheduler, n);
        rows.push(compare(n, &mut native, &mut wasm));
        anyhow::ensure!(wasm.engine.stats().fallback == 0, "{} faulted during the run", policy.display());
    }
    Ok(Report { noop_call_ns, rows })
}

fn noop_call(policy: &mut dyn Policy) -> anyhow::Result<f64> {
    let step = Step { token_budget: 2048, ..Step::default() };
    let batch = Batch { facts: &step, candidates: 0, columns: &[] };
    let mut decision = Decision::default();
    let mut samples = Vec::new();
    for _ in 0..PAIRS {
        let iterations = 10_000;
        let started = Instant::now();
        for _ in 0..iterations {
            policy.decide(&batch, &mut decision).map_err(|fault| anyhow::anyhow!("no-op: {fault}"))?;
        }
        samples.push(started.elapsed().as_nanos() as f64 / f64::from(iterations));
    }
    Ok(quantile(&mut samples, 0.5))
}

/// An engine with a fixed set of requests, half of them thinking, in an order that the policy changes.
struct Bench {
    engine: DispatchEngine,
    running: Vec<Slot>,
    facts: EngineFacts,
}

impl Bench {
    fn new(policy: Box<dyn Policy>, scheduler: &SchedulerConfig, candidates: usize) -> Self {
        let slot = DispatchSlot::new(policy, scheduler.targets());
        let markers = Markers::new(vec![vec![1]], vec![vec![2]], vec![]).expect("usable markers");
        let mut engine = DispatchEngine::new(slot, markers, scheduler, 16);
        let mut running = Vec::new();
        for i in 0..candidates {
            let request = NewRequest { prompt: &[0, 1], ..NewRequest::default() };
            let slot = engine.table_mut().insert(RequestId(i as u64), &request).expect("ids differ");
            // Times since progress that neither rise nor fall, within the starvation bound.
            engine.table_mut().scheduled(slot, 2, ((i * 7919) % 1009) as f64);
            engine.table_mut().generated(slot, if i % 2 == 0 { &[5, 6] } else { &[5, 2, 6] }, &mut Vec::new());
            running.push(slot);
        }
        let facts = EngineFacts {
            now_ms: 1010.0,
            token_budget: 8192,
            decode_tokens: 1,
            total_blocks: 1 << 16,
            ..EngineFacts::default()
        };
        Self { engine, running, facts }
    }

    /// Seconds of `iterations` decisions.
    fn time(&mut self, iterations: u32) -> f64 {
        let started = Instant::now();
        for _ in 0..iterations {
            std::hint::black_box(self.engine.plan(&self.facts, &self.running, &[]));
        }
        started.elapsed().as_secs_f64()
    }
}

fn compare(candidates: usize, native: &mut Bench, wasm: &mut Bench) -> Row {
    let once = native.time(20) / 20.0;
    let iterations = (SAMPLE.as_secs_f64() / once.max(1e-9)).clamp(10.0, 100_000.0) as u32;
    wasm.time(iterations);
    let (mut native_ns, mut wasm_ns, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        // Both orders, so that neither side always runs on the warmer cache.
        let (a, b) = if pair % 2 == 0 {
            let a = native.time(iterations);
            (a, wasm.time(iterations))
        } else {
            let b = wasm.time(iterations);
            (native.time(iterations), b)
        };
        let scale = 1e9 / f64::from(iterations);
        native_ns.push(a * scale);
        wasm_ns.push(b * scale);
        ratios.push(b / a);
    }
    Row {
        candidates,
        native_ns: quantile(&mut native_ns, 0.5),
        wasm_ns: quantile(&mut wasm_ns, 0.5),
        ratio: quantile(&mut ratios, 0.5),
        ratio_low: quantile(&mut ratios, 0.25),
        ratio_high: quantile(&mut ratios, 0.75),
    }
}

fn quantile(samples: &mut [f64], q: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[((samples.len() - 1) as f64 * q).round() as usize]
}
