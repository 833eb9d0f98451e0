//! What components decided in a slot is recorded, and they decide it again bit for bit.
//!
//! Needs the components: `make policies`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use meridian_core::budget::{BudgetCandidate, BudgetDecider, Load, Observed};
use meridian_core::slot::{Contender, PolicySlot, StrikeLimits};
use meridian_core::{
    BlockId, BlockTier, Budget, Dispatch, Eviction, EvictionCandidate, EvictionSubject, Markers, Memory,
    MeridianConfig, NewRequest, RequestTable, SlotKind, Step, Subject, Targets,
};
use meridian_engine::recording::{
    Outcome, Recordable, Recorder, RecorderSettings, Recording, ReplayOptions, ReplayReport, SlotSetup, replay,
};
use meridian_wasm::{GuestKind, PolicyComponent, PolicyLimits, Runtime};

use crate::wasm_support as support;

fn targets() -> Targets {
    MeridianConfig::default().scheduler.targets()
}

fn shipped(runtime: &Runtime, name: &str) -> PolicyComponent {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../target/policies/{name}.wasm"));
    runtime.load_file(&path).unwrap()
}

/// Record a slot while `decide` has it decide, and replay it with the same component.
fn check<K: GuestKind + Recordable>(
    name: &str,
    component: &PolicyComponent,
    decide: impl FnOnce(&mut PolicySlot<K>),
) -> (Vec<Recording>, ReplayReport) {
    let dir: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("replay-{name}"));
    let _ = std::fs::remove_dir_all(&dir);
    let settings = RecorderSettings { batch_age: Duration::from_secs(3600), ..RecorderSettings::new(dir.clone(), 64) };
    let recorder = Recorder::start(settings).unwrap();
    let setup = SlotSetup { targets: targets(), deadline_ms: 2.0, memory_mib: 64 };
    // A loaded machine may miss a deadline, which is not what is tested.
    let limits = PolicyLimits::UNHURRIED;
    let start = || component.policy::<K>(limits, targets(), "{}").unwrap();
    let contender = Contender::new(Box::new(start()), component.sha256(), name);
    let strikes = StrikeLimits { max_strikes: 1000, ..StrikeLimits::default() };
    let mut slot = PolicySlot::with_version(contender, targets(), strikes);
    slot.control().record(recorder.tap(setup));
    decide(&mut slot);
    recorder.close();
    let mut files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let recordings: Vec<_> = files.iter().map(|path| Recording::open(path).unwrap()).collect();
    assert_eq!(recordings[0].header().policy.version.sha256, component.sha256());
    let report =
        replay::<K>(&recordings, ReplayOptions::default(), &mut || Ok(Box::new(start())), &mut |_| ()).unwrap();
    assert_eq!((report.different, report.differences.as_slice()), (0, &[][..]), "{name}");
    (recordings, report)
}

fn steps(slot: &mut PolicySlot<Dispatch>) {
    let mut table = RequestTable::new(Markers::default());
    let mut live = Vec::new();
    for seq in 0..50u32 {
        let request =
            NewRequest { prompt_tokens: 10 + seq * 7 % 90, arrival_ms: f64::from(seq), ..NewRequest::default() };
        let row = table.insert(&request).unwrap();
        if seq % 3 > 0 {
            table.scheduled(row, 4 + seq, f64::from(seq));
        }
        live.push(row);
        let step = Step {
            now_ms: f64::from(seq) * 20.0,
            token_budget: 2048,
            running: seq,
            decode_tokens: 1,
            fixed_ms: 4.0,
            decode_token_ms: 0.02,
            prefill_token_ms: 0.01,
            ..Step::default()
        };
        slot.decide(&step, &table, &live, 16);
    }
}

#[test]
fn components_of_every_slot_decide_the_same_again() {
    let runtime = Runtime::new(None).unwrap();
    for name in Dispatch::NATIVES {
        let (_, report) = check::<Dispatch>(name, &shipped(&runtime, name), steps);
        assert_eq!((report.decisions, report.identical, report.gaps), (50, 50, 0), "{name}");
    }
    let evictions = |slot: &mut PolicySlot<Eviction>| {
        for seq in 0..30u32 {
            let candidates: Vec<_> = (0..seq)
                .map(|i| EvictionCandidate {
                    subject: EvictionSubject::Block(BlockId(i.into())),
                    tier: BlockTier::ThinkComplete,
                    blocks: 1 + i % 5,
                    position: i,
                    hits: i % 2,
                    age_ms: 3.5,
                    computed_tokens: 16 * (i % 3),
                    ..EvictionCandidate::default()
                })
                .collect();
            let subject = if seq % 2 == 0 { Subject::Blocks } else { Subject::Requests };
            let memory = Memory { now_ms: f64::from(seq), subject, cached_blocks: seq, ..Memory::default() };
            slot.decide(&memory, &candidates);
        }
    };
    for name in ["tiered-lru", "lru", "wa-lru", "prefix-value", "t-lru", "ttl", "cost-aware", "next-use"] {
        let (_, report) = check::<Eviction>(name, &shipped(&runtime, name), evictions);
        assert_eq!((report.decisions, report.identical), (30, 30), "{name}");
    }
    for name in ["eat-rpdi", "fixed-budget", "patience", "deadline-aware", "eat", "rpdi", "deer", "code-stop"] {
        let (_, report) = check::<Budget>(name, &shipped(&runtime, name), |slot| {
            let settled = Observed {
                is_probed: true,
                probes: 9,
                eat_bits: Some(0.1),
                eat_variance_bits2: Some(0.0),
                same_answers: 4,
                confidence: Some(0.97),
                ..Observed::default()
            };
            let candidates =
                [BudgetCandidate::default(), BudgetCandidate { observed: settled, ..BudgetCandidate::default() }];
            slot.start(&Load::default(), &candidates);
            slot.probe(&Load::default(), &candidates);
        });
        assert_eq!((report.decisions, report.identical), (2, 2), "{name}");
    }
}

/// A component that traps at each third call of an instance, and one whose keys are NaNs of several kinds.
#[test]
fn faults_and_odd_bits_come_out_the_same() {
    let runtime = Runtime::new(None).unwrap();
    let hostile = |name: &str| {
        let made = support::HOSTILE.iter().find(|hostile| hostile.name == name).unwrap();
        runtime.load(&made.component()).unwrap()
    };
    let (recordings, report) = check::<Dispatch>("trap-on-third-call", &hostile("trap-on-third-call"), steps);
    assert_eq!((report.recorded_faults, report.faults, report.identical), (16, 16, 50));
    let rows = recordings.iter().flat_map(|recording| recording.rows::<Dispatch>().unwrap()).map(Result::unwrap);
    let restarted = rows.filter(|row| row.restarted && row.outcome == Outcome::Decided).count();
    assert_eq!(restarted, 16);
    let (_, report) = check::<Dispatch>("nan-keys", &hostile("nan-keys"), steps);
    assert_eq!((report.identical, report.faults), (50, 0));
}
