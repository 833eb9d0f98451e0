//! What does one decision cost, and what does another policy or WebAssembly add to it?
//!
//! A decision is timed as the host makes it: columns built from what it knows, the policy called, the answer checked; in the
//! dispatch slot also the host's sort and guards. The slot's native default and the policy run in turn in one process, each
//! pair gives a ratio, and the median ratio is reported with its quartiles: this survives a noisy machine where two separate
//! timings do not.

use std::time::{Duration, Instant};

use meridian_core::budget::{BudgetCandidate, BudgetDecider, Load};
use meridian_core::slot::{BudgetSlot, Contender, DispatchSlot, EvictionSlot, StrikeLimits};
use meridian_core::types::BlockId;
use meridian_core::{
    Batch, BlockTier, Budget, Decision, Dispatch, EngineFacts, Eviction, EvictionCandidate, EvictionSubject, Fault,
    Markers, Memory, MeridianScheduler, NewRequest, PolicySource, RowId, SlotKind, SlotName, Step, Subject, native,
};
use meridian_wasm::GuestKind;
use serde::Serialize;

use crate::fault_limit::Watch;
use crate::policies::{Loader, PolicyArg};

/// Pairs of timings for each size; each side runs for about [`SAMPLE`].
const PAIRS: usize = 41;
const SAMPLE: Duration = Duration::from_millis(8);

/// The measurements of one run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Median nanoseconds of a call into a component that decides nothing; absent where there was none to call.
    pub noop_call_ns: Option<f64>,
    /// One row a slot, policy and batch size.
    pub rows: Vec<Row>,
}

/// One batch size of one policy in one slot.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The slot.
    pub slot: SlotName,
    /// The slot's native default.
    pub default: String,
    /// The policy that is timed against it; absent when only the default is.
    pub policy: Option<String>,
    /// Candidates of the batch.
    pub candidates: usize,
    /// Median nanoseconds of a decision by the default.
    pub default_ns: f64,
    /// Median nanoseconds of a decision by the policy.
    pub policy_ns: Option<f64>,
    /// Median of the paired ratios, policy over default.
    pub ratio: Option<f64>,
    /// Lower quartile of the paired ratios.
    pub ratio_low: Option<f64>,
    /// Upper quartile of the paired ratios.
    pub ratio_high: Option<f64>,
}

/// Time one policy against the native default of a slot at each batch size; without a policy the default alone.
///
/// # Errors
/// The policy does not load or is not one of the slot; it faults: the kind of the fault and what happened.
pub fn time(
    loader: &mut Loader,
    slot: SlotName,
    policy: Option<&PolicyArg>,
    candidates: &[usize],
    progress: &mut dyn FnMut(&str),
) -> anyhow::Result<Vec<Row>> {
    match slot {
        SlotName::Dispatch => time_in::<Dispatch>(loader, policy, candidates, progress),
        SlotName::Eviction => time_in::<Eviction>(loader, policy, candidates, progress),
        SlotName::Budget => time_in::<Budget>(loader, policy, candidates, progress),
    }
}

fn time_in<K: Timed>(
    loader: &mut Loader,
    policy: Option<&PolicyArg>,
    candidates: &[usize],
    progress: &mut dyn FnMut(&str),
) -> anyhow::Result<Vec<Row>> {
    let default = PolicySource::Native(K::NATIVES[0]).to_string();
    let mut rows = Vec::new();
    for &n in candidates {
        let slot = K::NAME;
        progress(&format!("{}: {n} candidates", slot.label()));
        let own = Contender::new(native::default_policy::<K>(loader.config().scheduler.targets()), "", &default);
        let mut own = K::bench(own, loader, n);
        let mut other = policy.map(|source| started::<K>(loader, source, n)).transpose()?;
        let timing = compare(&mut *own, other.as_deref_mut());
        // One that goes on faulting is given up, and its latest fault says no more than that.
        let given_up = loader.take_watches().iter().find_map(Watch::given_up);
        let fault = given_up.or_else(|| Some(format!("{}: {}", policy?.label, other.as_mut()?.fault()?)));
        if let Some(fault) = fault {
            anyhow::bail!("{} slot, {n} candidates: {fault}", slot.label());
        }
        let Timing { default_ns, policy_ns, ratios } = timing;
        let quartile = |q| ratios.clone().map(|mut ratios| quantile(&mut ratios, q));
        rows.push(Row {
            slot,
            default: default.clone(),
            policy: policy.map(|source| source.label.clone()),
            candidates: n,
            default_ns,
            policy_ns,
            ratio: quartile(0.5),
            ratio_low: quartile(0.25),
            ratio_high: quartile(0.75),
        });
    }
    Ok(rows)
}

fn started<K: Timed>(loader: &mut Loader, source: &PolicyArg, n: usize) -> anyhow::Result<Box<dyn Bench>> {
    let mut candidate = loader.load::<K>(source)?;
    let slot = K::NAME.label();
    candidate.warm_up().map_err(|trial| anyhow::anyhow!("{} in the {slot} slot: {trial}", source.label))?;
    Ok(K::bench(candidate, loader, n))
}

/// Median nanoseconds of a call into `noop`, a component that decides nothing.
///
/// # Errors
/// It does not load, or faults.
pub fn noop_call(loader: &mut Loader, noop: &PolicyArg) -> anyhow::Result<f64> {
    let mut policy = loader.load::<Dispatch>(noop)?.policy;
    let step = Step { token_budget: 2048, ..Step::default() };
    let batch = Batch { facts: &step, candidates: 0, columns: &[], finished: &[] };
    let mut decision = Decision::default();
    let mut samples = Vec::new();
    for _ in 0..PAIRS {
        let iterations = 10_000;
        let started = Instant::now();
        for _ in 0..iterations {
            policy.decide(&batch, &mut decision).map_err(|fault| anyhow::anyhow!("{}: {fault}", noop.label))?;
        }
        samples.push(started.elapsed().as_nanos() as f64 / f64::from(iterations));
    }
    Ok(quantile(&mut samples, 0.5))
}

/// A slot with a policy and a batch, asked again and again.
trait Bench {
    fn decide(&mut self);
    fn fault(&mut self) -> Option<Fault>;

    /// Seconds of `iterations` decisions.
    fn time(&mut self, iterations: u32) -> f64 {
        let started = Instant::now();
        for _ in 0..iterations {
            self.decide();
        }
        started.elapsed().as_secs_f64()
    }
}

trait Timed: GuestKind + SlotKind {
    fn bench(policy: Contender<Self>, loader: &Loader, candidates: usize) -> Box<dyn Bench>;
}

/// An engine with a fixed set of requests, half of them thinking, in an order that the policy changes.
struct DispatchBench {
    engine: MeridianScheduler,
    running: Vec<RowId>,
    facts: EngineFacts,
}

impl Timed for Dispatch {
    fn bench(policy: Contender<Self>, loader: &Loader, candidates: usize) -> Box<dyn Bench> {
        let scheduler = &loader.config().scheduler;
        let slot = DispatchSlot::with_version(policy, scheduler.targets(), StrikeLimits::default());
        let markers = Markers::new(vec![vec![1]], vec![vec![2]], vec![]).expect("usable markers");
        let mut engine = MeridianScheduler::for_engine(slot, markers, scheduler, 16);
        let mut running = Vec::new();
        for i in 0..candidates {
            let request = NewRequest { prompt: &[0, 1], ..NewRequest::default() };
            let slot = engine.mirror().table.insert(&request).expect("finite times");
            // Times since progress that neither rise nor fall, within the starvation bound.
            engine.mirror().table.scheduled(slot, 2, ((i * 7919) % 1009) as f64);
            engine.mirror().table.generated(slot, if i % 2 == 0 { &[5, 6] } else { &[5, 2, 6] }, &mut Vec::new());
            running.push(slot);
        }
        let facts = EngineFacts {
            now_ms: 1010.0,
            token_budget: 8192,
            decode_tokens: 1,
            total_blocks: 1 << 16,
            ..EngineFacts::default()
        };
        Box::new(DispatchBench { engine, running, facts })
    }
}

impl Bench for DispatchBench {
    fn decide(&mut self) {
        std::hint::black_box(self.engine.plan(&self.facts, &self.running, &[]));
    }

    fn fault(&mut self) -> Option<Fault> {
        self.engine.slot().last_fault()
    }
}

/// The blocks that a request leaves behind.
struct EvictionBench {
    slot: EvictionSlot,
    memory: Memory,
    blocks: Vec<EvictionCandidate>,
}

impl Timed for Eviction {
    fn bench(policy: Contender<Self>, loader: &Loader, candidates: usize) -> Box<dyn Bench> {
        let targets = loader.config().scheduler.targets();
        let count = u32::try_from(candidates).unwrap_or(u32::MAX);
        let block = |position: u32| EvictionCandidate {
            subject: EvictionSubject::Block(BlockId(position.into())),
            tier: BlockTier::ThinkComplete,
            blocks: 1,
            position,
            hits: position % 5,
            age_ms: ((position * 7919) % 1009) as f32,
            computed_tokens: 16,
            ..EvictionCandidate::default()
        };
        let memory = Memory {
            now_ms: 1010.0,
            subject: Subject::Blocks,
            free_blocks: 1 << 10,
            cached_blocks: 1 << 15,
            total_blocks: 1 << 16,
        };
        Box::new(EvictionBench {
            slot: EvictionSlot::with_version(policy, targets, StrikeLimits::default()),
            memory,
            blocks: (0..count).map(block).collect(),
        })
    }
}

impl Bench for EvictionBench {
    fn decide(&mut self) {
        std::hint::black_box(self.slot.decide(&self.memory, &self.blocks));
    }

    fn fault(&mut self) -> Option<Fault> {
        self.slot.last_fault()
    }
}

/// Requests that think, at a probe of each.
struct BudgetBench {
    slot: BudgetSlot,
    load: Load,
    requests: Vec<BudgetCandidate>,
}

impl Timed for Budget {
    fn bench(policy: Contender<Self>, loader: &Loader, candidates: usize) -> Box<dyn Bench> {
        let config = loader.config();
        let count = u32::try_from(candidates).unwrap_or(u32::MAX);
        let request = |i: u32| {
            let mut request = BudgetCandidate {
                prompt_tokens: 100 + i % 400,
                remaining_tokens: 4096,
                think_ms: 900.0,
                ..BudgetCandidate::default()
            };
            request.observed.think_tokens = 600 + i % 300;
            request.observed.is_probed = true;
            request.observed.probes = 8;
            request.observed.eat_bits = Some(f64::from(i % 7) / 4.0);
            request.observed.eat_variance_bits2 = Some(0.01);
            request
        };
        let load = Load {
            now_ms: 1010.0,
            thinking: count,
            free_blocks: 1 << 10,
            total_blocks: 1 << 16,
            configured: config.thresholds(),
            ..Load::default()
        };
        Box::new(BudgetBench {
            slot: BudgetSlot::with_version(policy, config.scheduler.targets(), StrikeLimits::default()),
            load,
            requests: (0..count).map(request).collect(),
        })
    }
}

impl Bench for BudgetBench {
    fn decide(&mut self) {
        std::hint::black_box(self.slot.probe(&self.load, &self.requests));
    }

    fn fault(&mut self) -> Option<Fault> {
        self.slot.last_fault()
    }
}

struct Timing {
    default_ns: f64,
    policy_ns: Option<f64>,
    ratios: Option<Vec<f64>>,
}

fn compare(default: &mut dyn Bench, mut policy: Option<&mut (dyn Bench + '_)>) -> Timing {
    let once = default.time(20) / 20.0;
    let iterations = (SAMPLE.as_secs_f64() / once.max(1e-9)).clamp(10.0, 100_000.0) as u32;
    let (mut default_ns, mut policy_ns, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let scale = 1e9 / f64::from(iterations);
    for pair in 0..PAIRS {
        let Some(policy) = policy.as_deref_mut() else {
            default_ns.push(default.time(iterations) * scale);
            continue;
        };
        if pair == 0 {
            policy.time(iterations);
        }
        // What faults is not worth the time.
        if policy.fault().is_some() {
            break;
        }
        // Both orders, so that neither side always runs on the warmer cache.
        let (a, b) = if pair % 2 == 0 {
            let a = default.time(iterations);
            (a, policy.time(iterations))
        } else {
            let b = policy.time(iterations);
            (default.time(iterations), b)
        };
        default_ns.push(a * scale);
        policy_ns.push(b * scale);
        ratios.push(b / a);
    }
    let median = |samples: &mut Vec<f64>| (!samples.is_empty()).then(|| quantile(samples, 0.5));
    Timing {
        default_ns: median(&mut default_ns).unwrap_or(once * 1e9),
        policy_ns: median(&mut policy_ns),
        ratios: (!ratios.is_empty()).then_some(ratios),
    }
}

fn quantile(samples: &mut [f64], q: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[((samples.len() - 1) as f64 * q).round() as usize]
}
