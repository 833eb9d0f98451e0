//! Replay: the recorded policy decides the same, another one is told apart.

use meridian_core::budget::{Load, Point};
use meridian_core::slot::{Contender, DispatchSlot, StrikeLimits};
use meridian_core::{
    Batch, Budget, Column, Decision, Description, Dispatch, Eviction, Fault, FaultKind, Memory, Policy, SlotKind,
    Subject,
};
use meridian_engine::recording::{
    Recordable, Recorded, Recorder, Recording, ReplayError, ReplayOptions, ReplayReport, replay,
};
use recorded::{Drive, dispatch_row, fault, folder, native, open_all, row_of, settings};

use crate::made;
use crate::recorded;

fn replay_with<K: Recordable>(dir: &std::path::Path, mut start: impl FnMut() -> Box<dyn Policy<K>>) -> ReplayReport {
    replay(&open_all(dir), ReplayOptions::default(), &mut || Ok(start()), &mut |_| ()).unwrap()
}

fn record<K: Recordable>(name: &str, policy: Box<dyn Policy<K>>, rows: &[Recorded<K>]) -> std::path::PathBuf {
    let dir = folder(name);
    let recorder = Recorder::start(settings(&dir)).unwrap();
    let mut drive = Drive::new(&recorder, policy, name);
    for row in rows {
        drive.decide(row);
        assert!(recorder.flush());
    }
    recorder.close();
    dir
}

fn check_native<K: Recordable>(name: &str, rows: &[Recorded<K>]) {
    let dir = record(name, native::<K>(name), rows);
    let report = replay_with(&dir, || native::<K>(name));
    assert_eq!(
        (report.decisions, report.identical, report.different),
        (rows.len() as u64, rows.len() as u64, 0),
        "{name}"
    );
    assert_eq!((report.faults, report.gaps), (0, 0));
    assert_eq!(report.candidates, rows.iter().map(|row| row.candidates as u64).sum::<u64>());
}

#[test]
fn every_native_policy_decides_the_same_again() {
    let steps: Vec<_> = (0..40).map(|seq| dispatch_row(seq, seq as usize % 20)).collect();
    for name in Dispatch::NATIVES {
        check_native::<Dispatch>(name, &steps);
    }
    let memory = |seq: u64| {
        let subject = if seq.is_multiple_of(2) { Subject::Blocks } else { Subject::Requests };
        row_of::<Eviction>(seq, seq as usize % 9, Memory { subject, now_ms: seq as f64, ..Memory::default() })
    };
    for name in Eviction::NATIVES {
        check_native::<Eviction>(name, &(0..20).map(memory).collect::<Vec<_>>());
    }
    let load = |seq: u64| {
        let point = if seq.is_multiple_of(2) { Point::Start } else { Point::Probe };
        row_of::<Budget>(seq, seq as usize % 9, Load { point, now_ms: seq as f64, ..Load::default() })
    };
    check_native::<Budget>("eat-rpdi", &(0..20).map(load).collect::<Vec<_>>());
}

#[test]
fn another_policy_is_told_apart() {
    let steps: Vec<_> = (0..10).map(|seq| dispatch_row(seq, 16)).collect();
    let dir = record("apart", native::<Dispatch>("output-first"), &steps);
    let report = replay_with(&dir, || native::<Dispatch>("fcfs"));
    assert_eq!((report.identical, report.different, report.differences.len()), (0, 10, 10));
    assert!(report.rank_correlation.unwrap() < 0.9);
    assert!(report.top_overlap.unwrap() < 1.0);
    assert_eq!(report.differing_judgements, 10, "the token budgets");
    let first = &report.differences[0];
    assert_eq!(first.seq, 0);
    assert!(first.recorded.starts_with("key ") && first.replayed.starts_with("key "), "{first:?}");
    let limited = ReplayOptions { limit: 3, shown: 1 };
    let report = replay::<Dispatch>(&open_all(&dir), limited, &mut || Ok(native("fcfs")), &mut |_| ()).unwrap();
    assert_eq!((report.decisions, report.differences.len()), (3, 1));
}

/// Counts its decisions and answers with the count, so that a lost one shows; faults at each seventh.
struct Counts {
    description: Description,
    count: u64,
    faults: bool,
    keeps: bool,
}

impl Counts {
    fn boxed(faults: bool, keeps: bool) -> Box<dyn Policy> {
        Box::new(Self { description: Description::default(), count: 0, faults, keeps })
    }
}

impl Policy for Counts {
    fn description(&self) -> &Description {
        &self.description
    }

    fn inputs(&self) -> &[Column] {
        &[Column::Rpdi]
    }

    fn decide(&mut self, batch: &Batch<'_>, decision: &mut Decision) -> Result<(), Fault> {
        self.count += 1;
        if self.faults && self.count == 7 {
            return Err(fault(FaultKind::Trap));
        }
        decision.keys.extend(batch.columns.iter().map(|value| value + self.count as f32));
        decision.token_budget = u32::try_from(self.count).ok();
        Ok(())
    }

    fn recover(&mut self) -> Result<(), Fault> {
        self.count = 0;
        Ok(())
    }

    fn snapshot(&mut self) -> Result<Vec<u8>, Fault> {
        Ok(if self.keeps { self.count.to_le_bytes().to_vec() } else { Vec::new() })
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Fault> {
        self.count = u64::from_le_bytes(state.try_into().map_err(|_| fault(FaultKind::Init))?);
        Ok(())
    }
}

/// Recorded from its 20th decision on, over several files, of which the first is lost.
#[test]
fn a_policy_with_state_goes_on_from_its_snapshot() {
    for keeps in [true, false] {
        let dir = folder(&format!("state-{keeps}"));
        let made = meridian_engine::recording::RecorderSettings { file_age_ms: 100.0, ..settings(&dir) };
        let recorder = Recorder::start(made).unwrap();
        let mut drive = Drive::<Dispatch>::new(&recorder, Counts::boxed(false, keeps), "counts");
        for seq in 0..40 {
            drive.decide(&dispatch_row(seq, 4));
            assert!(recorder.flush());
        }
        recorder.close();
        let mut recordings = open_all(&dir);
        assert!(recordings.len() > 4);
        let mut start = || Ok(Counts::boxed(false, keeps));
        let whole = replay::<Dispatch>(&recordings, ReplayOptions::default(), &mut start, &mut |_| ()).unwrap();
        assert_eq!((whole.identical, whole.different, whole.gaps), (40, 0, 0));
        recordings.remove(0);
        let later = replay::<Dispatch>(&recordings, ReplayOptions::default(), &mut start, &mut |_| ()).unwrap();
        assert_eq!(later.different == 0, keeps, "without a snapshot the first file is needed");
        recordings.remove(1);
        let gap = replay::<Dispatch>(&recordings, ReplayOptions::default(), &mut start, &mut |_| ()).unwrap();
        assert_eq!((gap.different == 0, gap.gaps), (keeps, 1));
    }
}

#[test]
fn a_policy_that_faulted_starts_afresh_where_it_did() {
    let steps: Vec<_> = (0..30).map(|seq| dispatch_row(seq, 4)).collect();
    let dir = record("faults", Counts::boxed(true, true), &steps);
    let report = replay_with::<Dispatch>(&dir, || Counts::boxed(true, true));
    assert_eq!((report.recorded_faults, report.faults), (4, 4));
    assert_eq!((report.identical, report.different), (30, 0));
    // The same policy without its fault differs there, and nowhere else: it too starts afresh.
    let report = replay_with::<Dispatch>(&dir, || Counts::boxed(false, true));
    assert_eq!((report.identical, report.different), (26, 4));
    assert_eq!(report.differences[0].recorded, "a fault: trap");
    let restarted: Vec<u64> = open_all(&dir)
        .iter()
        .flat_map(|file| file.rows::<Dispatch>().unwrap())
        .map(Result::unwrap)
        .filter(|row| row.restarted)
        .map(|row| row.seq)
        .collect();
    assert_eq!(restarted, [7, 14, 21, 28]);
}

#[test]
fn a_policy_that_cannot_be_started_is_an_error() {
    let dir = record("start", native::<Dispatch>("fcfs"), &[dispatch_row(0, 1)]);
    let refused = replay::<Dispatch>(
        &open_all(&dir),
        ReplayOptions::default(),
        &mut || Err("it takes no options".into()),
        &mut |_| (),
    );
    assert_eq!(refused, Err(ReplayError::Policy("it takes no options".into())));
}

/// The slot tells the recorder of every change of who decides, quarantine included.
#[test]
fn a_slot_records_who_decides() {
    let dir = folder("slot");
    let recorder = Recorder::start(settings(&dir)).unwrap();
    let contender = |policy: Box<dyn Policy>, source: &str| Contender::new(policy, "", source);
    let limits = StrikeLimits { max_strikes: 1, window_ms: 1000.0 };
    let mut slot = DispatchSlot::with_version(contender(native("fcfs"), "native:fcfs"), recorded::TARGETS, limits);
    let control = slot.control();
    control.record(recorder.tap(recorded::SETUP));
    let (table, live) = made::table(3);
    let mut decide = |now_ms: f64, count: usize| {
        for _ in 0..count {
            slot.decide(&made::step(now_ms, 3), &table, &live, 16);
        }
    };
    decide(0.0, 2);
    control.swap(contender(Counts::boxed(true, true), "counts"));
    // The seventh faults, and the one before stands in.
    decide(1.0, 9);
    // It returns after its quarantine.
    decide(5000.0, 3);
    recorder.close();
    let who: Vec<(String, Vec<u64>)> = open_all(&dir)
        .iter()
        .map(|file| {
            let rows = file.rows::<Dispatch>().unwrap().map(|row| row.unwrap().seq).collect();
            (file.header().policy.version.source.clone(), rows)
        })
        .collect();
    let expected: [(&str, Vec<u64>); 4] = [
        ("native:fcfs", vec![0, 1]),
        ("counts", (2..9).collect()),
        ("native:fcfs", vec![9, 10]),
        ("counts", vec![11, 12, 13]),
    ];
    assert_eq!(who, expected.map(|(source, rows)| (source.to_owned(), rows)));
    let counts: Vec<_> =
        open_all(&dir).into_iter().filter(|file| file.header().policy.version.source == "counts").collect();
    let mut start = || Ok(Counts::boxed(true, true));
    let report = replay::<Dispatch>(&counts, ReplayOptions::default(), &mut start, &mut |_| ()).unwrap();
    assert_eq!((report.identical, report.different, report.recorded_faults), (10, 0, 1));
}

#[test]
fn a_policy_that_counts_ended_requests_decides_the_same_again() {
    /// Its keys are the number of requests that it was told have ended.
    #[derive(Default)]
    struct Counts(Description, usize);
    impl Policy for Counts {
        fn description(&self) -> &Description {
            &self.0
        }
        fn inputs(&self) -> &[Column] {
            &[Column::Request]
        }
        fn decide(&mut self, batch: &Batch<'_>, decision: &mut Decision) -> Result<(), Fault> {
            self.1 += batch.finished.len();
            decision.keys = vec![self.1 as f32; batch.candidates];
            Ok(())
        }
        fn recover(&mut self) -> Result<(), Fault> {
            Ok(())
        }
    }
    let rows: Vec<_> =
        (0..20).map(|seq| Recorded { finished: (0..seq as u32 % 4).collect(), ..dispatch_row(seq, 3) }).collect();
    let dir = record("ended", Box::new(Counts::default()), &rows);
    let report = replay_with::<Dispatch>(&dir, || Box::new(Counts::default()));
    assert_eq!((report.decisions, report.identical), (20, 20));
}

#[test]
fn a_recording_of_an_unknown_contract_is_refused() {
    let dir = record("unknown-contract", native::<Dispatch>("fcfs"), &[dispatch_row(0, 2)]);
    let path = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(path).unwrap();
    let (written, other) = (b"\"contract\":\"1.0.0-rc\"", b"\"contract\":\"9.0.0-rc\"");
    let places: Vec<_> = (0..bytes.len() - written.len()).filter(|at| bytes[*at..].starts_with(written)).collect();
    assert!(!places.is_empty(), "the header names the contract");
    for at in places {
        bytes[at..at + other.len()].copy_from_slice(other);
    }
    let error = Recording::read("x.arrow", bytes).unwrap().rows::<Dispatch>().unwrap_err().to_string();
    assert_eq!(error, "x.arrow: it has contract \"9.0.0-rc\", expected \"1.0.0-rc\"");
}
