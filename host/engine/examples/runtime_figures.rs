//! Measures what a change, a fault and a long life of a policy cost the engine without vLLM; one JSON object a line.
//!
//!     cargo build --release --workspace --examples
//!     target/release/examples/runtime_figures swaps|fallback|endurance [COUNT]
//!
//! Needs the components: `make policies`.

#[path = "../../wasm/tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use meridian_core::slot::{Contender, DispatchSlot, Source, StrikeLimits};
use meridian_core::{
    Batch, Column, Decision, Description, EngineFacts, Fault, FaultKind, Markers, MeridianConfig, MeridianScheduler,
    NewRequest, Plan, Policy, Queues, RowId, TableStep, Targets,
};
use meridian_engine::control::{Control, Given, Mode, ProcessStatus, SlotName, Upload};
use meridian_engine::{ControlledSlot, Controller, Loader, Refusal};
use meridian_wasm::{EPOCH_TICK, PolicyLimits, Runtime};

/// Live requests while something is measured.
const LIVE: usize = 256;
const SEATS: usize = 192;
const TOKEN_BUDGET: u32 = 2048;
const THINK_START: u32 = 7;
const THINK_END: u32 = 8;

fn main() {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_default();
    let count = args.next().map(|count| count.parse().expect("COUNT is a number"));
    match what.as_str() {
        "swaps" => swaps(count.unwrap_or(10_000)),
        "fallback" => fallback(count.unwrap_or(2_000)),
        "endurance" => endurance(count.unwrap_or(1_000_000)),
        other => {
            eprintln!("error: {other:?}: expected swaps, fallback or endurance");
            std::process::exit(2);
        }
    }
}

fn targets() -> Targets {
    MeridianConfig::default().scheduler.targets()
}

fn print(name: &str, value: f64, unit: &str) {
    println!("{}", serde_json::json!({ "name": name, "value": value, "unit": unit }));
}

fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() as f64 * share).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

/// An engine with queues of its own that always has work: requests come as others end, each thinks and answers for a
/// while that its number tells. The same steps whenever the same plans are made.
struct Serving {
    engine: MeridianScheduler,
    queues: Queues,
    /// Tokens each live request has yet to generate: thinking, answer.
    left: BTreeMap<RowId, (u32, u32)>,
    submitted: u64,
    finished: u64,
    now_ms: f64,
}

impl Serving {
    fn new(slot: DispatchSlot) -> Self {
        let config = MeridianConfig::default();
        let markers = Markers::new(vec![vec![THINK_START]], vec![vec![THINK_END]], vec![]).expect("usable markers");
        Self {
            engine: MeridianScheduler::for_engine(slot, markers, &config.scheduler, 16),
            queues: Queues::default(),
            left: BTreeMap::new(),
            submitted: 0,
            finished: 0,
            now_ms: 0.0,
        }
    }

    /// One step; `free_blocks` is told to the policy as it is. Returns its plan and how long planning took.
    fn step(&mut self, free_blocks: u32) -> (Plan, Duration) {
        while self.left.len() < LIVE {
            self.submit();
        }
        self.now_ms += 5.0;
        let seats = SEATS - self.queues.running.len();
        let waiting: Vec<RowId> = if seats > 0 { self.queues.waiting.iter().copied().collect() } else { Vec::new() };
        let facts = EngineFacts {
            now_ms: self.now_ms,
            token_budget: TOKEN_BUDGET,
            free_blocks,
            total_blocks: 4096,
            free_seats: seats as u32,
            waiting: self.queues.waiting.len() as u32,
            decode_tokens: 1,
        };
        let started = Instant::now();
        let plan = self.engine.plan(&facts, &self.queues.running, &waiting);
        let took = started.elapsed();
        let plan = plan.clone();
        self.run(&plan);
        (plan, took)
    }

    fn submit(&mut self) {
        let number = self.submitted;
        self.submitted += 1;
        let of = |most: u64, factor: u64| (number.wrapping_mul(factor) >> 7) % most;
        let prompt_tokens = 16 + of(400, 0x9e37_79b9) as u32;
        let request =
            NewRequest { prompt: &[THINK_START], prompt_tokens, arrival_ms: self.now_ms, ..NewRequest::default() };
        let slot = self.engine.mirror().table.insert(&request).expect("finite times");
        self.queues.waiting.push_back(slot);
        self.left.insert(slot, (4 + of(60, 0x85eb_ca6b) as u32, 4 + of(40, 0xc2b2_ae35) as u32));
    }

    fn run(&mut self, plan: &Plan) {
        let table = &self.engine.mirror().table;
        let mut step = TableStep::new(table, 1);
        self.queues.carry_out(plan, SEATS, &mut step);
        let given = step.given;
        let whole: Vec<RowId> =
            given.iter().filter(|(row, tokens)| table[*row].needed_tokens(1) == *tokens).map(|(row, _)| *row).collect();
        self.engine.scheduled(self.now_ms, given);
        whole.into_iter().for_each(|row| self.generate(row));
    }

    fn generate(&mut self, slot: RowId) {
        let (think, answer) = self.left.get_mut(&slot).expect("a live request");
        let token = match (*think, *answer) {
            (0, _) => 40,
            (1, _) => THINK_END,
            _ => 20,
        };
        if *think > 0 {
            *think -= 1;
        } else {
            *answer -= 1;
        }
        let is_over = (*think, *answer) == (0, 0);
        self.engine.mirror().table.generated(slot, &[token], &mut Vec::new());
        if is_over {
            self.left.remove(&slot);
            self.queues.running.retain(|running| *running != slot);
            self.engine.mirror().table.remove(slot);
            self.finished += 1;
        }
    }

    /// Requests that are neither finished nor live in exactly one queue.
    fn lost(&mut self) -> u64 {
        let mut queued: Vec<RowId> = self.queues.running.iter().chain(&self.queues.waiting).copied().collect();
        let count = queued.len();
        queued.sort();
        queued.dedup();
        let live = self.left.keys().copied().eq(queued.iter().copied()) && self.engine.mirror().table.len() == count;
        let accounted = self.finished + queued.len() as u64;
        self.submitted.abs_diff(accounted) + (count - queued.len()) as u64 + u64::from(!live)
    }
}

fn no_limit() -> StrikeLimits {
    StrikeLimits { max_strikes: u32::MAX, ..StrikeLimits::default() }
}

fn output_first() -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/policies/output-first.wasm");
    std::fs::read(path).unwrap_or_else(|error| panic!("{path}: {error}: run `make policies` first"))
}

struct FromBytes(Runtime);

fn upload(component: &[u8]) -> Upload<'_> {
    Upload::component(component, "figures")
}

impl Loader<meridian_core::Dispatch> for FromBytes {
    fn load(&self, upload: &Upload<'_>) -> Result<Contender, Refusal> {
        let Given::Component { bytes, signature: _ } = upload.policy else {
            return Err(String::from("only components are swapped here").into());
        };
        let component = self.0.load(bytes).map_err(|error| error.to_string())?;
        let policy = component.dispatch_policy(limits(), targets(), "{}").map_err(|error| error.to_string())?;
        Ok(Contender::new(Box::new(policy), component.sha256(), upload.source))
    }
}

/// A deadline that only an endless loop misses: a busy machine may pause any call for milliseconds.
fn limits() -> PolicyLimits {
    PolicyLimits { deadline: Duration::from_secs(1), ..PolicyLimits::default() }
}

/// A folder for compiled components, gone when the process ends well.
struct Cache(std::path::PathBuf);

impl Cache {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("meridian-figures-{}", std::process::id()));
        Self(path)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Swaps between equal policies by the whole path of an upload (checks, compiled form from the cache, warm-up) while the
/// engine serves as fast as it can, beside an engine that is left alone.
fn swaps(count: usize) {
    let cache = Cache::new();
    let runtime = Runtime::new(Some(cache.0.clone())).expect("wasmtime starts");
    let loader = FromBytes(runtime);
    let bytes = output_first();
    // Another version of the same: an empty custom section at its end. Equal bytes are no new version.
    let versions = [[bytes.as_slice(), b"\0\x02\x01x"].concat(), bytes.clone()];
    let start = || {
        let candidate = loader.load(&upload(&bytes)).expect("the shipped component loads");
        DispatchSlot::with_version(candidate, targets(), StrikeLimits::default())
    };
    let (slot, alone) = (start(), start());
    let control = slot.control();
    let (mut swapped, mut left_alone) = (Serving::new(slot), Serving::new(alone));
    let mut quiet = Vec::new();
    for _ in 0..20_000 {
        quiet.push(swapped.step(1024).1.as_secs_f64() * 1e6);
        left_alone.step(1024);
    }
    let controlled = ControlledSlot { control, loader: Box::new(FromBytes(loader.0.clone())) };
    let controller = Controller::new(controlled, Box::new(ProcessStatus::default));
    let is_over = AtomicBool::new(false);
    let (mut different, mut during) = (0u64, Vec::new());
    let mut held: Vec<f64> = std::thread::scope(|scope| {
        let swapping = scope.spawn(|| {
            let swap = |version: &[u8]| controller.put(SlotName::Dispatch, &upload(version), Mode::Active);
            let held = (0..count).map(|i| swap(&versions[i % 2]).expect("it loads").held_us).collect();
            is_over.store(true, Ordering::Release);
            held
        });
        while !is_over.load(Ordering::Acquire) {
            let (plan, took) = swapped.step(1024);
            let (expected, _) = left_alone.step(1024);
            during.push(took.as_secs_f64() * 1e6);
            // The learned step time is fed with simulated times, so it is the same too.
            different += u64::from(plan != expected);
        }
        swapping.join().expect("swapping does not panic")
    });
    let stats = swapped.engine.slot().stats();
    print("swaps", held.len() as f64, "swaps");
    print("steps served meanwhile", during.len() as f64, "steps");
    print("requests finished", swapped.finished as f64, "requests");
    print("requests lost", swapped.lost() as f64, "requests");
    print("steps whose plan differs from that of an engine left alone", different as f64, "steps");
    print("decisions not made by the policy", (stats.default + stats.fallback) as f64, "decisions");
    print("time a swap held the slot, p99", percentile(&mut held, 0.99), "us");
    print("time a swap held the slot, longest", percentile(&mut held, 1.0), "us");
    print("planning a step while nothing swaps, p99", percentile(&mut quiet, 0.99), "us");
    print("planning a step while swapping, p99", percentile(&mut during, 0.99), "us");
}

/// How long planning takes in steps in which the policy faults.
fn fallback(count: usize) {
    let runtime = Runtime::new(None).expect("wasmtime starts");
    let hostile = |name: &str| {
        let hostile = support::HOSTILE.iter().find(|hostile| hostile.name == name).expect("it is there");
        runtime.load(&hostile.component()).expect("it is a component")
    };
    let measure = |name: &str, limits: PolicyLimits, count: usize| {
        let policy = hostile(name).dispatch_policy(limits, targets(), "{}").expect("it starts");
        let candidate = Contender::new(Box::new(policy), "", "figures");
        let mut serving = Serving::new(DispatchSlot::with_version(candidate, targets(), no_limit()));
        let mut times: Vec<f64> = (0..count).map(|_| serving.step(1024).1.as_secs_f64() * 1e6).collect();
        assert_eq!(serving.engine.last_source(), Some(Source::Fallback), "{name} faults at every step");
        assert_eq!(serving.engine.slot().stats().fallback as usize, count, "{name} faults at every step");
        assert_eq!(serving.lost(), 0);
        times.split_off(count / 10)
    };
    let mut native = Serving::new(DispatchSlot::new(meridian_core::native::default_policy(targets()), targets()));
    let mut base: Vec<f64> = (0..count).map(|_| native.step(1024).1.as_secs_f64() * 1e6).collect();
    print("planning a step with the native default, median", percentile(&mut base, 0.5), "us");
    let mut trap = measure("trap", limits(), count);
    print("planning a step in which the policy traps, p99", percentile(&mut trap, 0.99), "us");
    print("planning a step in which the policy traps, median", percentile(&mut trap, 0.5), "us");
    let mut endless = measure("endless-loop", PolicyLimits::default(), count.min(1_000));
    let bound_us = (PolicyLimits::default().deadline + 2 * EPOCH_TICK).as_secs_f64() * 1e6;
    print("deadline and two ticks", bound_us, "us");
    print("planning a step in which the policy loops, p99", percentile(&mut endless, 0.99), "us");
    print("planning a step in which the policy loops, median", percentile(&mut endless, 0.5), "us");
}

/// A policy that does not always start again, as a machine short of memory would have it.
struct Unreliable<P> {
    policy: P,
    recoveries: u64,
}

impl<P: Policy> Policy for Unreliable<P> {
    fn description(&self) -> &Description {
        self.policy.description()
    }

    fn inputs(&self) -> &[Column] {
        self.policy.inputs()
    }

    fn decide(&mut self, batch: &Batch<'_>, decision: &mut Decision) -> Result<(), Fault> {
        self.policy.decide(batch, decision)
    }

    fn recover(&mut self) -> Result<(), Fault> {
        self.recoveries += 1;
        if self.recoveries.is_multiple_of(5) {
            return Err(Fault::new(FaultKind::Init, "every fifth start fails"));
        }
        self.policy.recover()
    }
}

/// A component that decides by the engine's own order and faults when it is told to: `free_blocks` of the step says how
/// (0 not at all, 1 trap, 2 endless loop, 3 memory, 4 a key too many).
const ON_DEMAND: &str = "
    (if (i32.eq (local.get 2) (i32.const 1)) (then unreachable))
    (if (i32.eq (local.get 2) (i32.const 2)) (then (loop $l (br $l))))
    (if (i32.eq (local.get 2) (i32.const 3)) (then
      (loop $g (br_if $g (i32.ge_s (memory.grow (i32.const 64)) (i32.const 0)))) unreachable))
    (call $answer (i32.const 4096)
      (i32.add (local.get $candidates) (i32.eq (local.get 2) (i32.const 4))) (i32.const 0) (i32.const 0))";

/// Many steps of which one in a hundred faults, every kind in turn; beside them contenders that are refused.
fn endurance(steps: usize) {
    let runtime = Runtime::new(None).expect("wasmtime starts");
    let component = runtime.load(&support::component(&support::module("", ON_DEMAND))).expect("it is a component");
    // As short as the epoch allows: a hundredth of the steps wait for it.
    let limits = PolicyLimits { deadline: EPOCH_TICK, ..PolicyLimits::default() };
    let policy = component.dispatch_policy(limits, targets(), "{}").expect("it starts");
    let policy = Unreliable { policy, recoveries: 0 };
    let slot = DispatchSlot::with_version(Contender::new(Box::new(policy), "", "figures"), targets(), no_limit());
    let controlled = ControlledSlot { control: slot.control(), loader: Box::new(FromBytes(runtime.clone())) };
    let controller = Controller::new(controlled, Box::new(ProcessStatus::default));
    let mut serving = Serving::new(slot);
    let (mut injected, mut early_kib) = (0u64, 0.0);
    for step in 0..steps {
        let kind = if step % 100 == 99 { 1 + (step / 100 % 4) as u32 } else { 0 };
        injected += u64::from(kind > 0);
        if step % 1_000 == 500 {
            let refused = controller.put(SlotName::Dispatch, &upload(b"\0asm but no component"), Mode::Active);
            assert!(refused.is_err(), "garbage is refused");
            injected += 1;
        }
        if step == steps / 10 {
            early_kib = resident_kib();
        }
        serving.step(kind);
        if step % (steps / 10).max(1) == 0 {
            eprintln!("  step {step} of {steps}");
        }
    }
    let late_kib = resident_kib();
    let stats = serving.engine.slot().stats();
    print("steps", steps as f64, "steps");
    print("faults injected", injected as f64, "faults");
    for kind in FaultKind::ALL {
        print(&format!("faults counted: {}", kind.label()), stats.faults(kind) as f64, "faults");
    }
    print("steps decided by whomever", stats.decisions() as f64, "steps");
    print("requests finished", serving.finished as f64, "requests");
    print("requests lost", serving.lost() as f64, "requests");
    print("resident memory after a tenth of the steps", early_kib, "KiB");
    print("resident memory at the end", late_kib, "KiB");
}

/// Resident memory of this process, KiB.
fn resident_kib() -> f64 {
    let status = std::fs::read_to_string(Path::new("/proc/self/status")).expect("Linux tells");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("it names the resident size");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number of KiB")
}
