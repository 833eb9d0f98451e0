use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use meridian_core::{Batch, Description, Dispatch, Fault, FaultKind, Targets};
use wasmtime::{Store, Trap, UpdateDeadline};

use crate::LoadError;
use crate::bulk::BULK_BYTES_PER_TICK;
use crate::clock::CallClock;
use crate::component::Shared;
use crate::error::one_line;
use crate::guest::{GuestKind, Lifecycle};
use crate::limiter::Limiter;
use crate::runtime::{EPOCH_TICK, MAX_MEMORY_BYTES};
use crate::stack::with_room;
use crate::thread_time::thread_time;
use crate::wit;

/// What a policy may use. The bulk instructions of a call (`memory.fill`, `memory.copy` and their like) may touch
/// [`BULK_BYTES_PER_TICK`] for each tick of the call's deadline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyLimits {
    /// Longest processor time of one decision; kept to the epoch's grain of 0.5 ms, rounded up. The first late decision
    /// after hundreds in time may use twice as much.
    pub deadline: Duration,
    /// The deadline whose bytes the bulk instructions of a decision have, where that is not `deadline`: a run that waits for any
    /// decision still refuses what an engine would.
    pub bulk: Option<Duration>,
    /// Longest decision of a trial, a made-up batch off the hot path. So long that it says something about the policy, and
    /// nothing about a busy machine; the bytes of bulk instructions are those of `deadline`.
    pub trial: Duration,
    /// Longest start. That is off the hot path: it may parse options and build tables.
    pub start: Duration,
    /// Longest `snapshot`, and longest `restore`; each has `deadline` too. A step may wait for the slot meanwhile, so
    /// handing over does not get the time of a decision, which the operator may have set to a second.
    pub handover: Duration,
    /// Longest new start after a fault, which happens inside a step.
    pub recovery: Duration,
    /// Most linear memory, bytes.
    pub memory_bytes: usize,
}

impl PolicyLimits {
    /// For runs that no engine waits for, and whose result must not depend on how busy the machine is: a simulation, a
    /// replay, a test. What does not end is still stopped, after 10 seconds.
    pub const UNHURRIED: Self = {
        let patience = Duration::from_secs(10);
        Self {
            deadline: patience,
            bulk: None,
            trial: patience,
            start: patience,
            handover: patience,
            recovery: patience,
            memory_bytes: 64 << 20,
        }
    };
}

impl Default for PolicyLimits {
    /// An engine's: 2 ms for a decision, a second for one of a trial, 200 ms to start, 2 ms for each side of a handover,
    /// 5 ms to start again.
    fn default() -> Self {
        Self {
            deadline: Duration::from_millis(2),
            bulk: None,
            trial: Duration::from_secs(1),
            start: Duration::from_millis(200),
            handover: Duration::from_millis(2),
            recovery: Duration::from_millis(5),
            memory_bytes: 64 << 20,
        }
    }
}

/// Most bytes that `describe`, `init` and `inputs` may hand to the host.
const START_ANSWER_BYTES: usize = 64 << 10;
/// Most bytes of a snapshot: it is handed over while the slot is held.
pub const MAX_STATE_BYTES: usize = 1 << 20;
/// Most linear memory of an instance that is freed where it faulted: that takes microseconds, as starting a thread does.
const FREED_AT_ONCE_BYTES: usize = 4 << 20;
/// Instances of one policy that are being freed at a time, at most: as many as faults put it into quarantine by default.
/// Each occupies a place in the pool until then.
const MAX_FREEING: usize = 3;
/// Bytes of an answer beside its keys and caps.
const ANSWER_OVERHEAD_BYTES: usize = 256;

/// What a store holds beside the guest.
pub struct StoreState {
    limiter: Limiter,
    clock: CallClock,
}

struct Instance<K: GuestKind> {
    store: Store<StoreState>,
    lifecycle: Lifecycle,
    guest: K::Guest,
}

/// A policy that runs as a WebAssembly component; of the dispatch slot unless another is named.
///
/// After any fault the store is dead; [`meridian_core::Policy::recover`] makes a new one from the compiled component and
/// initialises it with the same configuration.
pub struct WasmPolicy<K: GuestKind = Dispatch> {
    shared: Arc<Shared>,
    limits: PolicyLimits,
    /// What a decision may take.
    decision: Allowed,
    targets: Targets,
    config_json: String,
    description: Description,
    inputs: Vec<K::Column>,
    instance: Option<Instance<K>>,
    /// Threads that free the instances that faulted last.
    freeing: VecDeque<JoinHandle<()>>,
}

impl<K: GuestKind> WasmPolicy<K> {
    pub(crate) fn start(
        shared: Arc<Shared>,
        limits: PolicyLimits,
        targets: Targets,
        config_json: &str,
    ) -> Result<Self, LoadError> {
        let limits = PolicyLimits { memory_bytes: limits.memory_bytes.min(MAX_MEMORY_BYTES), ..limits };
        let mut policy = Self {
            shared,
            limits,
            decision: Allowed::new(limits.deadline, bulk_bytes(limits.bulk.unwrap_or(limits.deadline))),
            targets,
            config_json: config_json.to_owned(),
            description: Description::default(),
            inputs: Vec::new(),
            instance: None,
            freeing: VecDeque::new(),
        };
        policy.instantiate(limits.start)?;
        Ok(policy)
    }

    /// Free the instance; a large one on a thread of its own, because giving back the pages that it touched may take
    /// milliseconds, and a step may be waiting.
    fn discard(&mut self) {
        let Some(instance) = self.instance.take() else { return };
        if instance.store.data().limiter.taken_bytes() <= FREED_AT_ONCE_BYTES {
            return;
        }
        self.freeing.retain(|thread| !thread.is_finished());
        if self.freeing.len() == MAX_FREEING
            && let Some(oldest) = self.freeing.pop_front()
        {
            // It panicked if this fails, and what it held is gone all the same.
            let _ = oldest.join();
        }
        // Without a thread the closure is dropped here, and the instance with it.
        self.freeing.extend(thread::Builder::new().name("meridian-free".into()).spawn(move || drop(instance)));
    }

    /// Make the instance, and take description and inputs from it.
    fn instantiate(&mut self, deadline: Duration) -> Result<(), LoadError> {
        self.discard();
        let state = StoreState { limiter: Limiter::new(self.limits.memory_bytes), clock: CallClock::new() };
        let mut store = Store::new(&self.shared.engine, state);
        store.limiter(|state| &mut state.limiter);
        store.epoch_deadline_callback(|mut store| Ok(at_deadline(&mut store.data_mut().clock)));
        allow(&mut store, Allowed::all(deadline), START_ANSWER_BYTES);
        let started = with_room(|| self.start_in(&mut store));
        let Started { lifecycle, guest, description, inputs } = started.map_err(|error| {
            let fault = fault_of(&store, &error, Allowed::all(deadline));
            LoadError::Start { fault: Fault::new(FaultKind::Init, fault.to_string()) }
        })??;
        self.description = description;
        self.inputs = inputs;
        self.instance = Some(Instance { store, lifecycle, guest });
        Ok(())
    }

    /// The outer error is a fault, the inner one what the component refuses.
    fn start_in(&self, store: &mut Store<StoreState>) -> wasmtime::Result<Result<Started<K>, LoadError>> {
        let instance = match self.shared.pre.instantiate(&mut *store) {
            // Neither its code nor its limits: the machine did not give what an instance needs.
            Err(error) if !error.is::<Trap>() && store.data().limiter.refusal().is_none() => {
                return Ok(Err(LoadError::Setup { detail: no_instance(&error) }));
            }
            instantiated => instantiated?,
        };
        let wrong_type = |error: wasmtime::Error| LoadError::WrongType { detail: one_line(&error) };
        let (lifecycle, guest) = match self.shared.functions::<K>(&mut *store, &instance) {
            Ok(Some(functions)) => functions,
            Ok(None) => return Ok(Err(self.shared.not_filled::<K>())),
            Err(error) => return Ok(Err(wrong_type(error))),
        };
        let description = lifecycle.describe(store)?;
        if let Err(reason) = lifecycle.init::<K>(store, self.targets, &self.config_json)? {
            let reason = wit::clip(reason, 512);
            return Ok(Err(LoadError::Refused { config: self.config_json.clone(), reason }));
        }
        let inputs = K::inputs(&guest, &mut *store)?;
        Ok(Ok(Started { lifecycle, guest, description, inputs }))
    }
}

/// What a new instance says of itself.
struct Started<K: GuestKind> {
    lifecycle: Lifecycle,
    guest: K::Guest,
    description: Description,
    inputs: Vec<K::Column>,
}

/// What one call may take.
#[derive(Clone, Copy)]
struct Allowed {
    time: Duration,
    /// The same in ticks of the epoch.
    ticks: u64,
    /// Bytes that bulk instructions may touch.
    bulk_bytes: u64,
}

impl Allowed {
    /// All that a deadline allows.
    fn all(deadline: Duration) -> Self {
        Self::new(deadline, bulk_bytes(deadline))
    }

    fn new(time: Duration, bulk_bytes: u64) -> Self {
        Self { time, ticks: ticks(time), bulk_bytes }
    }
}

impl<K: GuestKind> WasmPolicy<K> {
    /// Call the instance within limits; `answer_bytes` bounds what it may hand over. A fault costs the instance.
    fn call<R>(
        &mut self,
        allowed: Allowed,
        answer_bytes: usize,
        call: impl FnOnce(&mut Store<StoreState>, &Lifecycle, &K::Guest) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        let Some(Instance { store, lifecycle, guest }) = &mut self.instance else {
            return Err(Fault::new(FaultKind::Init, "the policy has no instance"));
        };
        let started = Instant::now();
        store.data_mut().limiter.forget();
        allow(store, allowed, answer_bytes);
        let answered = with_room(|| call(store, lifecycle, guest));
        let fault = match answered {
            Ok(answer) => match late(store, started.elapsed(), allowed.time) {
                None => return Ok(answer),
                Some(fault) => fault,
            },
            Err(error) => fault_of(store, &error, allowed),
        };
        self.discard();
        Err(fault)
    }

    fn decide_within(
        &mut self,
        allowed: Allowed,
        batch: &Batch<'_, K>,
        decision: &mut K::Decision,
    ) -> Result<(), Fault> {
        let answer_bytes = batch.candidates.saturating_mul(K::ANSWER_BYTES).saturating_add(ANSWER_OVERHEAD_BYTES);
        self.call(allowed, answer_bytes, |store, lifecycle, guest| {
            if !batch.finished.is_empty() {
                lifecycle.finished(store, batch.finished)?;
            }
            K::decide(guest, store, batch, decision)
        })
    }

    fn handover(&self) -> Allowed {
        Allowed::all(self.limits.deadline.min(self.limits.handover))
    }
}

impl<K: GuestKind> meridian_core::Policy<K> for WasmPolicy<K> {
    fn description(&self) -> &Description {
        &self.description
    }

    fn inputs(&self) -> &[K::Column] {
        &self.inputs
    }

    fn decide(&mut self, batch: &Batch<'_, K>, decision: &mut K::Decision) -> Result<(), Fault> {
        self.decide_within(self.decision, batch, decision)
    }

    fn try_out(&mut self, batch: &Batch<'_, K>, decision: &mut K::Decision) -> Result<(), Fault> {
        let PolicyLimits { deadline, trial, .. } = self.limits;
        self.decide_within(Allowed::new(deadline.max(trial), self.decision.bulk_bytes), batch, decision)
    }

    fn snapshot(&mut self) -> Result<Vec<u8>, Fault> {
        let state = self.call(self.handover(), MAX_STATE_BYTES, |store, lifecycle, _| lifecycle.snapshot(store))?;
        if state.len() > MAX_STATE_BYTES {
            let detail = format!("a snapshot of {} bytes, expected at most {MAX_STATE_BYTES}", state.len());
            return Err(Fault::new(FaultKind::BadAnswer, detail));
        }
        Ok(state)
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Fault> {
        let restored =
            self.call(self.handover(), START_ANSWER_BYTES, |store, lifecycle, _| lifecycle.restore(store, state))?;
        restored.map_err(|reason| Fault::new(FaultKind::Init, wit::clip(reason, 512)))
    }

    fn recover(&mut self) -> Result<(), Fault> {
        let started = Instant::now();
        self.instantiate(self.limits.recovery).map_err(init_fault)?;
        // Most of a start is not the component's code, which alone the epoch stops.
        let recovery = self.limits.recovery;
        let store = self.instance.as_mut().map(|instance| &mut instance.store);
        match store.and_then(|store| late(store, started.elapsed(), recovery)) {
            None => Ok(()),
            Some(fault) => {
                self.discard();
                Err(Fault::new(FaultKind::Init, fault.to_string()))
            }
        }
    }

    fn start_anew(&mut self) -> Result<(), Fault> {
        self.instantiate(self.limits.start).map_err(init_fault)
    }
}

fn init_fault(error: LoadError) -> Fault {
    match error {
        LoadError::Start { fault } => fault,
        other => Fault::new(FaultKind::Init, other.to_string()),
    }
}

/// What bulk instructions may touch until the deadline.
fn bulk_bytes(deadline: Duration) -> u64 {
    ticks(deadline).saturating_mul(BULK_BYTES_PER_TICK)
}

/// Ticks until the deadline has surely passed: the tick under way may be almost over.
fn ticks(deadline: Duration) -> u64 {
    u64::try_from(deadline.as_nanos().div_ceil(EPOCH_TICK.as_nanos())).unwrap_or(u64::MAX / 2).max(1) + 1
}

/// Give a store what its next call may take; `answer_bytes` refuses an enormous answer before it is copied.
fn allow(store: &mut Store<StoreState>, allowed: Allowed, answer_bytes: usize) {
    let Allowed { time, ticks, bulk_bytes } = allowed;
    store.data_mut().clock.begin(time, thread_time);
    store.set_epoch_deadline(ticks);
    store.set_fuel(bulk_bytes).expect("the engine consumes fuel");
    store.set_hostcall_fuel(answer_bytes);
}

/// The epoch has reached the deadline of the call under way, which ends unless the machine kept its processor time back.
fn at_deadline(clock: &mut CallClock) -> UpdateDeadline {
    clock.tripped(thread_time).map_or(UpdateDeadline::Interrupt, UpdateDeadline::Continue)
}

/// The fault of an answer that came too late.
fn late(store: &mut Store<StoreState>, took: Duration, deadline: Duration) -> Option<Fault> {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    store.data_mut().clock.late(took, thread_time).map(|used| {
        let detail = format!("answered after {:.1} ms, expected at most {} ms", ms(used), ms(deadline));
        Fault::new(FaultKind::Deadline, detail)
    })
}

/// Why the machine made no instance.
fn no_instance(error: &wasmtime::Error) -> String {
    let of_system = |cause: &(dyn std::error::Error + 'static)| {
        let io = cause.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::OutOfMemory);
        io || cause.to_string().contains("Cannot allocate memory")
    };
    let why = one_line(error);
    if error.chain().any(of_system) {
        return format!("no address space for an instance: {why}; expected 4.1 GiB for each, see `ulimit -v`");
    }
    format!("no instance: {why}")
}

fn fault_of(store: &Store<StoreState>, error: &wasmtime::Error, allowed: Allowed) -> Fault {
    if let Some(refusal) = store.data().limiter.refusal() {
        return Fault::new(FaultKind::Memory, refusal);
    }
    let trap = error.downcast_ref::<Trap>();
    let kind = match trap {
        Some(Trap::Interrupt | Trap::OutOfFuel) => FaultKind::Deadline,
        Some(_) => FaultKind::Trap,
        // Not a trap: the answer could not be lifted.
        None => FaultKind::BadAnswer,
    };
    let detail = match trap {
        Some(Trap::OutOfFuel) => {
            format!(
                "bulk instructions of more than {} bytes in one call, the most for its deadline",
                allowed.bulk_bytes
            )
        }
        Some(trap) => trap.to_string(),
        None => one_line(error),
    };
    Fault::new(kind, detail)
}
