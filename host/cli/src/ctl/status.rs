//! The state of one engine process, as text.

use meridian_core::LevelCounts;
use meridian_core::budget::{BudgetStatus, ForceReason};
use meridian_core::latency::{Histogram, STEP_BUCKETS_S, TenantLatency, WAIT_BUCKETS_S};
use meridian_engine::control::{
    KvStatus, ProcessStatus, RecordingStatus, ShadowStatus, SlotStatus, TracesStatus, Version,
};
use meridian_fleet::EngineClient;

use crate::print_line;
use crate::target::shown;

pub(crate) fn version_text(version: &Version) -> String {
    let Version { name, version, sha256, source: _, options: _ } = version;
    let digest: String = sha256.chars().take(8).collect();
    let parts = [name.as_str(), version.as_str(), &digest];
    shown(&parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" "))
}

/// A data-parallel rank of a number of ranks, if known.
pub(super) fn rank_text(rank: Option<u32>, size: Option<u32>) -> String {
    match (rank, size) {
        (Some(rank), Some(size)) => format!("{rank} of {size}"),
        (Some(rank), None) => rank.to_string(),
        (None, _) => "-".into(),
    }
}

/// Most characters of options in a line of text; `--json` has them all.
const SHOWN_OPTIONS: usize = 120;

/// The options of a version, cut; empty where there are none.
pub(super) fn options_text(version: &Version) -> String {
    match version.options.as_str() {
        "" | "{}" => String::new(),
        options if options.chars().count() > SHOWN_OPTIONS => {
            shown(&options.chars().take(SHOWN_OPTIONS).chain("...".chars()).collect::<String>())
        }
        options => shown(options),
    }
}

pub(super) fn print_status(engine: &EngineClient, status: &ProcessStatus) -> anyhow::Result<()> {
    let ProcessStatus {
        pid,
        version,
        model,
        dp_rank,
        dp_size,
        uptime_s,
        requests,
        // Counters for rates: `--json` and the metrics have them.
        phase_events: _,
        steps: _,
        blocks: _,
        waiting,
        preemptions,
        step_time_ms,
        latency,
        sessions,
        service_levels,
        kv,
        budget,
        slots,
        recording,
        traces,
        outputs,
        problems,
    } = status;
    let (model, version) = (shown(model), shown(version));
    let rank = dp_rank.map_or_else(String::new, |rank| format!("  rank {}", rank_text(Some(rank), *dp_size)));
    print_line(&format!("process {pid}  {model}  meridian {version}  up {uptime_s:.0} s{rank}  {}", engine.address()))?;
    problems.iter().try_for_each(|problem| print_line(&format!("  problem      {}", shown(problem))))?;
    if !outputs.is_empty() {
        print_line(&format!("  outputs      {}", shown(outputs)))?;
    }
    let [prefill, think, output] = requests;
    print_line(&format!(
        "  requests     prefill {prefill}, think {think}, output {output}, waiting {waiting}, sessions {sessions}"
    ))?;
    let [prefill, think, output] = preemptions;
    print_line(&format!("  preemptions  prefill {prefill}, think {think}, output {output}"))?;
    for LevelCounts { name, ended: [kept, missed], refused, live: [can, cannot] } in service_levels {
        let name = shown(name);
        print_line(&format!(
            "  level        {name}: {kept} in time, {missed} late, {refused} refused; live: {can} in time, {cannot} late"
        ))?;
    }
    if let Some([fixed, decode, prefill]) = step_time_ms {
        print_line(&format!(
            "  step time    {fixed:.3} ms, {decode:.4} ms a decode token, {prefill:.4} ms a prefill token"
        ))?;
    }
    print_latency(latency)?;
    if let Some(kv) = kv {
        print_kv(kv)?;
    }
    if let Some(budget) = budget {
        print_budget(budget)?;
    }
    if let Some(RecordingStatus { dir, recorded, dropped, bytes, stopped }) = recording {
        let mib = *bytes as f64 / f64::from(1 << 20);
        let stopped = stopped.as_ref().map_or_else(String::new, |why| format!(", stopped: {}", shown(why)));
        print_line(&format!(
            "  recording    {recorded} decisions, {dropped} dropped, {mib:.1} MiB in {}{stopped}",
            shown(dir)
        ))?;
    }
    if let Some(TracesStatus { sent, lost }) = traces {
        print_line(&format!("  traces       {sent} requests sent, {lost} lost"))?;
    }
    slots.iter().try_for_each(print_slot)
}

/// Medians over all tenants since the start.
fn print_latency(tenants: &[TenantLatency]) -> anyhow::Result<()> {
    if tenants.is_empty() {
        return Ok(());
    }
    let all = crate::top::all_tenants(tenants);
    let of = |histogram: &Histogram, bounds: &[f64]| {
        let [median, p99] = [0.5, 0.99].map(|share| crate::top::time(histogram.quantile(bounds, share)));
        format!("{median}/{p99}")
    };
    Ok(print_line(&format!(
        "  latency      p50/p99: TTFT {}, TTFO {}, ITL think {} output {}, queue {}",
        of(&all.ttft, &WAIT_BUCKETS_S),
        of(&all.ttfo, &WAIT_BUCKETS_S),
        of(&all.think_itl, &STEP_BUCKETS_S),
        of(&all.output_itl, &STEP_BUCKETS_S),
        of(&all.queue, &WAIT_BUCKETS_S)
    ))?)
}

fn print_kv(status: &KvStatus) -> anyhow::Result<()> {
    let KvStatus { evictions, hit_tokens, missed_tokens, recomputed_tokens, avoidable_output_preemptions, .. } = status;
    let (hits, misses) = (hit_tokens.iter().sum::<u64>(), missed_tokens.iter().sum::<u64>());
    let share = if hits + misses > 0 { 100.0 * hits as f64 / (hits + misses) as f64 } else { 0.0 };
    let [dead, cached, output] = evictions;
    print_line(&format!(
        "  KV memory    {share:.1} % of tokens found in the cache, {recomputed_tokens} computed again after preemption"
    ))?;
    Ok(print_line(&format!(
        "  evictions    {dead} blocks of dead thinking, {cached} other cached, {output} of answers in progress \
         ({avoidable_output_preemptions} preemptions of answers avoidable)"
    ))?)
}

fn print_budget(status: &BudgetStatus) -> anyhow::Result<()> {
    let BudgetStatus {
        forced, missed, waited, probes_done, probes_dropped, probe_tokens, think_tokens, thought, ..
    } = status;
    let mean = if *thought > 0 { *think_tokens as f64 / *thought as f64 } else { 0.0 };
    let ended: Vec<_> = ForceReason::ALL
        .iter()
        .zip(forced)
        .filter(|(_, count)| **count > 0)
        .map(|(reason, count)| format!("{} {count}", reason.label()))
        .collect();
    let ended = if ended.is_empty() { "none forced".to_owned() } else { format!("forced: {}", ended.join(", ")) };
    Ok(print_line(&format!(
        "  thinking     {mean:.0} tokens a request, the mean of {thought} that are over; {ended} ({missed} tokens missed, {waited} \
         waited for a mask or a tool call); {probes_done} probes of {probe_tokens} tokens, {probes_dropped} dropped"
    ))?)
}

fn print_slot(status: &SlotStatus) -> anyhow::Result<()> {
    let SlotStatus { slot, active, previous, shadow, quarantine, decisions, faults, .. } = status;
    let [policy, default, fallback] = decisions;
    print_line(&format!("  {}", slot.label()))?;
    let row = |name: &str, text: &str| print_line(&format!("    {name:<10} {text}"));
    row("active", &format!("{}  from {}", version_text(active), shown(&active.source)))?;
    let with = |version: &Version| match options_text(version) {
        options if options.is_empty() => Ok(()),
        options => row("  options", &options),
    };
    with(active)?;
    if let Some(previous) = previous {
        row("previous", &version_text(previous))?;
        with(previous)?;
    }
    row("decisions", &format!("policy {policy}, default {default}, fallback {fallback}"))?;
    if status.idle_plans > 0 {
        row("idle plans", &format!("{} left nothing to run; the host lifted their caps", status.idle_plans))?;
    }
    if let Some(shadow) = shadow {
        row("shadow", &shadow_text(shadow))?;
        with(&shadow.version)?;
    }
    if !faults.is_empty() {
        row("faults", &format!("{}; strikes {}", faults_text(faults), status.strikes))?;
    }
    if let Some((version, ms)) = quarantine {
        row("quarantine", &format!("{}, tried again in {:.0} s", version_text(version), ms / 1e3))?;
    }
    if let Some(refusal) = &status.last_refusal {
        row("refused", &shown(refusal))?;
    }
    Ok(())
}

pub(crate) fn faults_text(faults: &[(String, u64)]) -> String {
    shown(&faults.iter().map(|(kind, count)| format!("{kind} {count}")).collect::<Vec<_>>().join(", "))
}

pub(crate) fn shadow_text(shadow: &ShadowStatus) -> String {
    let ShadowStatus { version, compared, skipped, faults, rank_correlation, top_overlap, differences, deciding_us } =
        shadow;
    format!(
        "{}  correlation {rank_correlation:.3}, overlap {top_overlap:.3}, differences {differences}, \
         compared {compared}, skipped {skipped}, faults {faults}, {deciding_us:.1} us",
        version_text(version)
    )
}
