//! A process that records what it is asked.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use meridian_core::LevelCounts;
use meridian_core::budget::BudgetStatus;
use meridian_core::latency::{Histogram, LatencyCounts, STEP_BUCKETS_S, TOKEN_BUCKETS, TenantLatency, WAIT_BUCKETS_S};
use meridian_engine::budgets::{BudgetList, ChangeError, ChangeReport, LiveBudget, LiveBudgets, LiveChange};
use meridian_engine::control::{
    Control, ControlError, FaultEntry, Given, Insight, KvStatus, LatencyReport, Mode, ProcessStatus, RecordingStatus,
    ShadowStatus, SlotName, SlotStatus, StateHandover, SwapReport, TracesStatus, UNCHANGED, Upload, Version,
};
use meridian_engine::explain::Explanation;
use meridian_engine::timeline::Timeline;

/// Records what it is asked.
#[derive(Default)]
pub struct Recorder {
    pub calls: Mutex<Vec<String>>,
    /// Whether its faults are more than a socket holds.
    pub verbose: AtomicBool,
    /// Whether it can load nothing now.
    pub is_busy: AtomicBool,
    /// Whether its slots have whatever is put there.
    pub has_it: AtomicBool,
    /// Who is told of every component as it comes, refused ones included.
    pub listener: Mutex<Option<Sender<Vec<u8>>>>,
}

pub fn version(name: &str) -> Version {
    Version {
        name: name.into(),
        version: "1.0".into(),
        sha256: "ab".repeat(32),
        source: "admin".into(),
        ..Version::default()
    }
}

/// Every field is filled.
pub fn status() -> ProcessStatus {
    let dispatch = SlotStatus {
        slot: SlotName::Dispatch,
        active: version("current \"one\"\\"),
        previous: Some(version("earlier")),
        shadow: Some(ShadowStatus {
            version: version("candidate"),
            compared: 40,
            skipped: 2,
            faults: 1,
            rank_correlation: 0.5,
            top_overlap: 0.75,
            differences: 3,
            deciding_us: 12.5,
        }),
        quarantine: Some((version("bad"), 12_000.0)),
        decisions: [90, 7, 3],
        deciding_s: [0.2, 0.02, 0.03],
        deciding_buckets: [
            [10, 20, 30, 0, 0, 0, 0, 0, 0, 0, 0, 29, 1],
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0],
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1],
        ],
        faults: vec![("trap".into(), 2), ("deadline".into(), 1)],
        strikes: 2,
        idle_plans: 11,
        swaps: 5,
        last_refusal: Some("not a component".into()),
    };
    let eviction = SlotStatus {
        slot: SlotName::Eviction,
        active: Version { sha256: String::new(), ..version("tiered-lru") },
        previous: None,
        shadow: None,
        quarantine: None,
        decisions: [0; 3],
        deciding_s: [0.0; 3],
        deciding_buckets: [[0; 13]; 3],
        faults: Vec::new(),
        strikes: 0,
        idle_plans: 0,
        swaps: 0,
        last_refusal: None,
    };
    ProcessStatus {
        outputs: "thinking ends at 4,096 tokens; loops end".into(),
        phase_events: [11, 8, 2],
        kv: Some(KvStatus {
            evictions: [40, 7, 2],
            offload_evictions: [3, 1, 0],
            hit_tokens: [640, 32, 0],
            missed_tokens: [128, 64, 8],
            recomputed_tokens: 96,
            avoidable_output_preemptions: 1,
            moved_blocks: 5,
            resyncs: 1,
            kept_blocks: 9,
            keeps: [6, 3, 4],
        }),
        budget: Some(BudgetStatus {
            forced: [4, 3, 2, 1, 0, 5, 6, 7],
            missed: 1,
            waited: 3,
            probes_asked: 30,
            probes_done: 20,
            probes_dropped: 9,
            probe_tokens: 400,
            think_tokens: 9000,
            thought: 12,
            reopened: 2,
        }),
        pid: std::process::id(),
        version: "0.1.0".into(),
        model: "Qwen/Qwen3-8B".into(),
        dp_rank: Some(1),
        dp_size: Some(2),
        uptime_s: 61.5,
        requests: [3, 20, 5],
        waiting: 7,
        preemptions: [0, 4, 1],
        step_time_ms: Some([4.0, 0.02, 0.003]),
        steps: vec![
            histogram(&STEP_BUCKETS_S, &[0.018; 3]),
            histogram(&STEP_BUCKETS_S, &[]),
            histogram(&STEP_BUCKETS_S, &[9.0]),
        ],
        latency: vec![TenantLatency {
            tenant: "team \"a\"".into(),
            queue: histogram(&WAIT_BUCKETS_S, &[0.002, 0.2]),
            ttft: histogram(&WAIT_BUCKETS_S, &[0.25, 0.5]),
            ttfo: histogram(&WAIT_BUCKETS_S, &[2.0]),
            ttot: histogram(&WAIT_BUCKETS_S, &[0.02]),
            think_itl: histogram(&STEP_BUCKETS_S, &[0.018; 40]),
            output_itl: histogram(&STEP_BUCKETS_S, &[0.02; 20]),
            e2e: histogram(&WAIT_BUCKETS_S, &[4.0]),
            think_tokens: histogram(&TOKEN_BUCKETS, &[400.0]),
        }],
        sessions: 6,
        service_levels: vec![LevelCounts { name: "chat".into(), ended: [80, 5], refused: 3, live: [7, 2] }],
        blocks: Some([100, 512]),
        slots: vec![dispatch, eviction],
        recording: Some(RecordingStatus {
            dir: "/var/recordings".into(),
            recorded: 1000,
            dropped: 3,
            bytes: 4096,
            stopped: None,
        }),
        traces: Some(TracesStatus { sent: 70, lost: 4 }),
        problems: Vec::new(),
    }
}

fn histogram(bounds: &[f64], values: &[f64]) -> Histogram {
    let mut histogram = Histogram::new(bounds.len());
    values.iter().for_each(|value| histogram.observe(bounds, *value));
    histogram
}

pub fn fault() -> FaultEntry {
    FaultEntry {
        slot: SlotName::Dispatch,
        now_ms: 1500.0,
        kind: "trap".into(),
        detail: "unreachable".into(),
        version: version("bad"),
        shadow: false,
        candidates: 4,
        batch: None,
    }
}

impl Recorder {
    fn record(&self, call: String) {
        self.calls.lock().unwrap().push(call);
    }

    pub fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    fn act(&self, slot: SlotName, action: &str) -> Result<SwapReport, ControlError> {
        self.record(format!("{action} {}", slot.label()));
        match slot {
            SlotName::Dispatch => Ok(SwapReport {
                slot,
                action: if self.has_it.load(Ordering::Relaxed) { UNCHANGED } else { action }.into(),
                active: version("candidate"),
                previous: version("current"),
                state: StateHandover::Reset("another layout".into()),
                held_us: 12.5,
            }),
            SlotName::Eviction => Err(ControlError::Nothing { slot, what: "has no such version" }),
            SlotName::Budget => Err(ControlError::NoSuchSlot(slot)),
        }
    }
}

impl Insight for Recorder {
    fn explain(&self, request: &str) -> Result<Explanation, String> {
        match request {
            "chat 1/é" => Ok(Explanation { request: request.into(), latency_ms: 12.5, ..Explanation::default() }),
            _ => Err(format!("{request}: no such request")),
        }
    }

    fn begin_timeline(&self) {
        self.record("begin timeline".into());
    }

    fn end_timeline(&self) -> Option<Timeline> {
        self.record("end timeline".into());
        let mut timeline = Timeline::new("Qwen", 5.0);
        timeline.end(6.0);
        Some(timeline)
    }

    fn latency(&self) -> Option<LatencyReport> {
        if self.is_busy.load(Ordering::Relaxed) {
            return None;
        }
        let ttft = [20.0, 40.0].into_iter().collect();
        let counts = LatencyCounts { finished: 3, output_tokens: 80, ttft, ..LatencyCounts::default() };
        Some(LatencyReport { run: "7-1a".into(), uptime_s: 12.5, counts })
    }
}

/// What it says of its one live request.
pub fn live() -> LiveBudget {
    LiveBudget {
        request: "chatcmpl-\u{1b}1".into(),
        tenant: "batch".into(),
        phase: "think".into(),
        think_tokens: 40,
        max_think_tokens: 512,
        ..LiveBudget::default()
    }
}

impl LiveBudgets for Recorder {
    fn list(&self) -> Result<BudgetList, ChangeError> {
        Ok(BudgetList { live: 1, requests: vec![live()] })
    }

    fn change(&self, change: LiveChange) -> Result<ChangeReport, ChangeError> {
        self.calls.lock().unwrap().push(serde_json::to_string(&change).unwrap());
        match change.request.as_deref() {
            Some("absent") => Err(ChangeError::NoSuchRequest("absent: no live request has this id".into())),
            Some("over") => Err(ChangeError::NothingToChange("over: 1 answer already".into())),
            Some("late") => Err(ChangeError::Busy("16 changes wait".into())),
            _ => Ok(ChangeReport { changed: 1, answering: 2, ending: 0, requests: vec![live()] }),
        }
    }
}

impl Control for Recorder {
    fn status(&self) -> ProcessStatus {
        status()
    }

    fn insight(&self) -> Option<&dyn Insight> {
        Some(self)
    }

    fn budgets(&self) -> Option<&dyn LiveBudgets> {
        Some(self)
    }

    fn faults(&self) -> Vec<FaultEntry> {
        let mut fault = fault();
        if self.verbose.load(Ordering::Relaxed) {
            fault.detail = "x".repeat(64 << 20);
        }
        vec![fault]
    }

    fn put(&self, slot: SlotName, upload: &Upload<'_>, mode: Mode) -> Result<SwapReport, ControlError> {
        let Upload { policy, options, source } = upload;
        let options = options.map(|options| format!(" with {options}")).unwrap_or_default();
        let (component, signature) = match policy {
            Given::Component { bytes, signature } => (bytes, signature),
            Given::Native(name) => return self.act(slot, &format!("put native:{name} {mode:?} {source}{options}")),
            Given::Remote(reference) => return self.act(slot, &format!("put {reference} {mode:?} {source}{options}")),
            Given::Fetched(_) => panic!("only the controller has fetched one"),
            Given::Active => return self.act(slot, &format!("put the active one {mode:?} {source}{options}")),
        };
        if let Some(listener) = &*self.listener.lock().unwrap() {
            let _ = listener.send(component.to_vec());
        }
        if self.is_busy.load(Ordering::Relaxed) {
            return Err(ControlError::Busy("the compiler is busy".into()));
        }
        match *component {
            b"garbage" => return Err(ControlError::Refused("not a component:\nno header".into())),
            b"panic" => panic!("as a test wants"),
            _ => {}
        }
        let signed = signature.map(|signature| format!(" signed {signature:?}")).unwrap_or_default();
        self.act(slot, &format!("put {} bytes {mode:?} {source}{signed}{options}", component.len()))
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.act(slot, "promote")
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.act(slot, "rollback")
    }

    fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.act(slot, "release")
    }

    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.act(slot, "stop-shadow")
    }
}

/// A folder of this test's own.
pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}
