//! Measures the simulator; one JSON object a line.
//!
//!     sim_figures identical|speed|million FOLDER_OF_COMPONENTS

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail};
use meridian_bench::policies::{Choice, Loader, Policies, PolicyArg};
use meridian_bench::results::Slo;
use meridian_bench::sim::{EngineConfig, Outcome, Simulation, preset};
use meridian_bench::trace::{Generator, TraceRequest, Workload};
use meridian_core::MeridianConfig;
use serde_json::json;

/// Every shipped dispatch policy that is built both ways.
const POLICIES: [&str; 9] =
    ["balanced", "output-first", "noop", "priority", "pascal", "srpt", "fair-share", "edf", "qoe"];
/// Traffic with tenants, priorities and deadlines, for those that read them.
const TRAFFIC: &str = "
requests_per_s = 5.0
tenants = { count = 8 }
classes = [
  { weight = 0.6, priority = 0 },
  { weight = 0.2, priority = -1, deadline_ms = 20000.0 },
  { weight = 0.2, priority = 2, deadline_ms = 90000.0 },
]";

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, components] = arguments.as_slice() else {
        bail!("expected what to measure, and a folder of components")
    };
    let components = Path::new(components);
    match what.as_str() {
        "identical" => identical(components),
        "speed" => speed(components),
        "million" => million(),
        other => bail!("{other}: expected identical, speed or million"),
    }
}

fn policies(dispatch: &str) -> anyhow::Result<Policies> {
    let dispatch: PolicyArg = dispatch.parse().map_err(anyhow::Error::msg)?;
    let config = MeridianConfig::from_toml("[model]\nstrips_reasoning = true")?;
    Policies::load(&mut Loader::new(config), &Choice { dispatch, eviction: None, budget: None, inject: None }, 1)
}

fn simulate(
    engine: &EngineConfig,
    dispatch: &str,
    count: usize,
    requests: impl Iterator<Item = TraceRequest>,
) -> anyhow::Result<Outcome> {
    Ok(Simulation::new(engine, vec![policies(dispatch)?], Slo::default(), count).run(requests, |_| {}))
}

fn component(components: &Path, policy: &str) -> String {
    components.join(format!("{policy}.wasm")).display().to_string()
}

/// The schedules of both builds, as digests of which request got how many tokens in which step.
fn identical(components: &Path) -> anyhow::Result<()> {
    // Few seats and little KV memory, so that there is something to decide.
    let engine = EngineConfig { kv_blocks: 20_000, ..preset::named("7b-h100").context("a preset")? };
    let workload = Workload::from_toml(TRAFFIC)?;
    for policy in POLICIES {
        let run = |source: &str| -> anyhow::Result<Outcome> {
            simulate(&engine, source, 4000, Generator::new(&workload, 7)?.take(4000))
        };
        let wasm = run(&component(components, policy))?;
        let native = run(policy)?;
        let metric = |key: &str| wasm.run.metrics.get(key).copied().unwrap_or(0.0);
        println!(
            "{}",
            json!({
                "policy": policy,
                "decisions": metric("decisions"),
                "faults": metric("faults"),
                "native": native.digest,
                "component": wasm.digest,
            })
        );
    }
    Ok(())
}

/// Steps a second with 64 running: long decodes, a queue behind them, output-first in both builds, in turns.
fn speed(components: &Path) -> anyhow::Result<()> {
    const REQUESTS: u32 = 2000;
    let engine = EngineConfig { max_num_seqs: 64, ..preset::named("7b-h100").context("a preset")? };
    let requests = |i: u32| TraceRequest {
        arrival_s: 0.001 * f64::from(i),
        prompt_tokens: 200,
        think_tokens: 4000 + i * 37 % 4000,
        output_tokens: 500 + i * 91 % 1000,
        ..TraceRequest::default()
    };
    let run = |source: &str| -> anyhow::Result<f64> {
        let started = Instant::now();
        let outcome = simulate(&engine, source, REQUESTS as usize, (0..REQUESTS).map(requests))?;
        Ok(outcome.steps as f64 / started.elapsed().as_secs_f64())
    };
    for _ in 0..9 {
        let (native, wasm, stock) = (run("output-first")?, run(&component(components, "output-first"))?, run("fcfs")?);
        println!("{}", json!({ "native": native, "component": wasm, "stock": stock }));
    }
    Ok(())
}

/// A million requests of plain chat on one engine, and a tenth of them before: time, and the most memory so far.
fn million() -> anyhow::Result<()> {
    let engine = preset::named("7b-h100").context("a preset")?;
    let workload = Workload { requests_per_s: 12.0, ..Workload::named("plain-chat")? };
    let run = |count: usize| -> anyhow::Result<(f64, u64, f64)> {
        let started = Instant::now();
        let outcome = simulate(&engine, "output-first", count, Generator::new(&workload, 1)?.take(count))?;
        Ok((started.elapsed().as_secs_f64(), outcome.steps, peak_mib()?))
    };
    let (_, _, tenth_peak_mib) = run(100_000)?;
    let (seconds, steps, peak_mib) = run(1_000_000)?;
    println!(
        "{}",
        json!({ "seconds": seconds, "steps": steps, "peak_mib": peak_mib, "tenth_peak_mib": tenth_peak_mib })
    );
    Ok(())
}

fn peak_mib() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("VmHWM in /proc/self/status")?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024.0)
}
