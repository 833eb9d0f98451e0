//! Recordings: what is written is read again, whole or cut, and decides the same.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use arrow_ipc::reader::FileReader;
use meridian_core::budget::Verdict;
use meridian_core::slot::{Contender, DispatchSlot, StrikeLimits};
use meridian_core::{
    Asked, Batch, Budget, Column, Decision, Description, Dispatch, Eviction, EvictionColumn, Fault, FaultKind, Memory,
    Policy, Ranking, Step, Subject,
};
use meridian_engine::recording::{
    Outcome, Recordable, Recorded, Recorder, RecorderSettings, Recording, ReplayOptions, replay,
};
use proptest::prelude::*;
use recorded::{Drive, dispatch_row, fault, files, folder, native, open_all, settings};

use crate::made;
use crate::recorded;

/// Any bits: quiet and signalling NaNs with payloads, both zeros, infinities.
fn bits() -> impl Strategy<Value = f32> {
    prop_oneof![any::<u32>().prop_map(f32::from_bits), Just(-0.0), Just(f32::from_bits(0x7fa0_0001)), 0.0f32..9.0]
}

fn floats(count: usize) -> impl Strategy<Value = Vec<f32>> {
    proptest::collection::vec(bits(), count)
}

fn outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        4 => Just(Outcome::Decided),
        1 => Just(Outcome::LeftToDefault),
        1 => (0usize..6).prop_map(|kind| Outcome::Faulted(FaultKind::ALL[kind])),
        1 => Just(Outcome::NotAsked),
    ]
}

fn dispatch_rows() -> impl Strategy<Value = Vec<Recorded<Dispatch>>> {
    let row = (0usize..6).prop_flat_map(|n| {
        let answer = prop_oneof![Just(n), Just(0)];
        let keys = answer.clone().prop_flat_map(floats);
        let victims = answer.clone().prop_flat_map(floats);
        let caps = answer.prop_flat_map(|n| proptest::collection::vec(any::<u32>(), n));
        (
            Just(n),
            floats(n * Column::COUNT),
            keys,
            any::<Option<u32>>(),
            (caps, victims),
            any::<[u32; 8]>(),
            floats(3),
            any::<u64>(),
            outcome(),
        )
    });
    let row = row.prop_map(
        |(candidates, columns, keys, token_budget, (token_caps, victim_keys), counts, times, now, outcome)| {
            let [
                token_budget_fact,
                free_blocks,
                total_blocks,
                running,
                running_think,
                running_output,
                waiting,
                decode_tokens,
            ] = counts;
            let facts = Step {
                now_ms: f64::from_bits(now),
                token_budget: token_budget_fact,
                free_blocks,
                total_blocks,
                running,
                running_think,
                running_output,
                waiting,
                decode_tokens,
                fixed_ms: times[0],
                decode_token_ms: times[1],
                prefill_token_ms: times[2],
                decode_context_tokens: now,
            };
            let decision = Decision { keys, token_budget, token_caps, victim_keys };
            let finished = vec![free_blocks; candidates % 3];
            Recorded { outcome, facts, candidates, columns, finished, decision, ..Recorded::default() }
        },
    );
    proptest::collection::vec(row, 0..12)
}

/// A row without what the recorder adds, as text that shows every bit.
fn shown<K: Recordable>(row: &Recorded<K>) -> String {
    let bits: Vec<u32> = row.columns.iter().map(|value| value.to_bits()).collect();
    let keys: Vec<u32> = K::keys(&row.decision).iter().map(|value| value.to_bits()).collect();
    format!(
        "{:?} {:?} {} {bits:?} {:?} {keys:?} {:?}",
        row.outcome, row.facts, row.candidates, row.finished, row.decision
    )
}

fn check_round_trip<K: Recordable>(name: &str, native_name: &str, rows: &[Recorded<K>]) {
    let dir = folder(name);
    let recorder = Recorder::start(settings(&dir)).unwrap();
    let mut drive = Drive::<K>::new(&recorder, native(native_name), native_name);
    for row in rows {
        drive.record_made_up(row);
    }
    recorder.close();
    let read: Vec<Recorded<K>> =
        open_all(&dir).iter().flat_map(|file| file.rows::<K>().unwrap()).collect::<Result<_, _>>().unwrap();
    assert_eq!(read.len(), rows.len());
    for (seq, (read, row)) in read.iter().zip(rows).enumerate() {
        assert_eq!(read.seq, seq as u64);
        assert_eq!(read.snapshot.is_some(), seq == 0);
        let is_fault = matches!(row.outcome, Outcome::Faulted(_) | Outcome::NotAsked);
        let decision = if is_fault { K::Decision::default() } else { row.decision.clone() };
        assert_eq!(shown(read), shown(&Recorded { decision, ..row.clone() }));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn dispatch_rows_come_back_bit_for_bit(rows in dispatch_rows()) {
        check_round_trip("round-trip-dispatch", "fcfs", &rows);
    }

    #[test]
    fn eviction_rows_come_back_bit_for_bit(
        rows in proptest::collection::vec((0usize..5).prop_flat_map(|n| (floats(n * EvictionColumn::COUNT), floats(n), any::<bool>(), outcome())), 0..9),
    ) {
        let rows: Vec<_> = rows.into_iter().map(|(columns, keys, is_requests, outcome)| {
            let candidates = keys.len();
            // Keys as times to keep: any bits.
            let decision = Ranking { keep_ms: if is_requests { Vec::new() } else { keys.clone() }, keys };
            let subject = if is_requests { Subject::Requests } else { Subject::Blocks };
            let facts = Memory { now_ms: -0.0, subject, free_blocks: 1, cached_blocks: 2, total_blocks: u32::MAX };
            Recorded::<Eviction> { outcome, facts, candidates, columns, decision, ..Recorded::default() }
        }).collect();
        check_round_trip("round-trip-eviction", "tiered-lru", &rows);
    }

    #[test]
    fn budget_rows_come_back_bit_for_bit(
        rows in proptest::collection::vec((0usize..5).prop_flat_map(|n| (Just(n), floats(n * Budget::COLUMNS.len()), any::<bool>())), 0..9),
    ) {
        let rows: Vec<_> = rows.into_iter().map(|(candidates, columns, is_start)| {
            let mut row = Recorded::<Budget> { candidates, columns, ..Recorded::default() };
            if is_start {
                row.decision.thresholds = vec![row.facts.configured; candidates];
            } else {
                row.facts.point = meridian_core::budget::Point::Probe;
                row.decision.verdicts = [Verdict::EndNow, Verdict::Default, Verdict::KeepThinking].into_iter().cycle().take(candidates).collect();
            }
            row
        }).collect();
        check_round_trip("round-trip-budget", "eat-rpdi", &rows);
    }

    /// Whatever is changed in a file, it is read or refused.
    #[test]
    fn a_damaged_file_is_read_or_refused(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = small_file();
        for (index, byte) in &changes {
            let at = index.index(bytes.len());
            bytes[at] = *byte;
        }
        if let Ok(recording) = Recording::read("damaged", bytes) {
            let _ = recording.row_count();
            if let Ok(rows) = recording.rows::<Dispatch>() {
                rows.for_each(drop);
            }
        }
    }
}

/// A file of two batches, of three rows each.
fn small_file() -> Vec<u8> {
    static FILE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    FILE.get_or_init(|| {
        let dir = folder("small");
        let recorder = Recorder::start(settings(&dir)).unwrap();
        let mut drive = Drive::<Dispatch>::new(&recorder, native("output-first"), "output-first");
        for seq in 0..6 {
            drive.decide(&dispatch_row(seq, 2));
            if seq == 2 {
                assert!(recorder.flush());
            }
        }
        recorder.close();
        fs::read(&files(&dir)[0]).unwrap()
    })
    .clone()
}

#[test]
fn a_file_that_is_cut_anywhere_gives_the_batches_before() {
    let bytes = small_file();
    let whole = Recording::read("whole", bytes.clone()).unwrap();
    assert_eq!((whole.cut(), whole.row_count()), (None, 6));
    let mut seen = [false; 7];
    for length in 0..bytes.len() {
        let Ok(cut) = Recording::read("cut", bytes[..length].to_vec()) else { continue };
        let rows = cut.rows::<Dispatch>().unwrap().map(Result::unwrap).count();
        assert!(matches!(rows, 0 | 3 | 6), "{rows} rows of {length} bytes");
        seen[rows] = true;
        if rows < 6 {
            assert!(cut.cut().is_some(), "{length} bytes");
        }
    }
    assert_eq!(seen, [true, false, false, true, false, false, true]);
}

/// A batch is written over the footer before it; where that was interrupted, the rest of the old footer follows.
#[test]
fn a_batch_that_is_torn_by_an_old_footer_is_left_out() {
    let dir = folder("torn");
    let recorder = Recorder::start(settings(&dir)).unwrap();
    let mut drive = Drive::<Dispatch>::new(&recorder, native("fcfs"), "fcfs");
    drive.decide(&dispatch_row(0, 2));
    assert!(recorder.flush());
    let before = fs::read(&files(&dir)[0]).unwrap();
    drive.decide(&dispatch_row(1, 2));
    assert!(recorder.flush());
    let after = fs::read(&files(&dir)[0]).unwrap();
    let common = before.iter().zip(&after).take_while(|(one, other)| one == other).count();
    assert!(after.len() > before.len() && common < before.len());
    for written in common + 1..after.len() {
        let mut torn = after[..written].to_vec();
        torn.extend_from_slice(before.get(written..).unwrap_or_default());
        let torn = Recording::read("torn", torn).unwrap();
        let rows: Vec<_> = torn.rows::<Dispatch>().unwrap().map(Result::unwrap).collect();
        assert_eq!(rows[0].seq, 0);
        if rows.len() == 2 {
            let whole = Recording::read("after", after.clone()).unwrap();
            assert_eq!(shown(&rows[1]), shown(&whole.rows::<Dispatch>().unwrap().nth(1).unwrap().unwrap()));
        } else {
            assert!(torn.cut().is_some());
        }
    }
}

/// Arrow's own reader, after every batch and while the file is being written.
#[test]
fn other_readers_understand_a_file_at_any_time() {
    let dir = folder("arrow");
    let recorder = Recorder::start(settings(&dir)).unwrap();
    let mut drive = Drive::<Dispatch>::new(&recorder, native("output-first"), "output-first");
    for seq in 0..4 {
        drive.decide(&dispatch_row(seq, 3));
        assert!(recorder.flush());
        let reader = FileReader::try_new(fs::File::open(&files(&dir)[0]).unwrap(), None).unwrap();
        let schema = reader.schema();
        assert_eq!(schema.field(0).name(), "seq");
        let header: serde_json::Value = serde_json::from_str(&schema.metadata()["meridian"]).unwrap();
        assert_eq!(header["policy"]["version"]["source"], "native:output-first");
        assert_eq!(header["policy"]["inputs"][2], "in_wait_ms");
        let rows: usize = reader.map(|batch| batch.unwrap().num_rows()).sum();
        assert_eq!(rows, seq as usize + 1);
    }
}

#[test]
fn files_are_private_and_rotate_within_a_bound() {
    let dir = folder("rotate");
    let settings =
        RecorderSettings { max_bytes: 400 << 10, file_bytes: 40 << 10, batch_bytes: 8 << 10, ..settings(&dir) };
    let recorder = Recorder::start(settings).unwrap();
    let mut drive = Drive::<Dispatch>::new(&recorder, native("output-first"), "output-first");
    for seq in 0..2000 {
        drive.decide(&dispatch_row(seq, 16));
        // Nothing is dropped as long as the queue is emptied.
        if seq.is_multiple_of(8) {
            assert!(recorder.flush());
        }
    }
    let status = {
        assert!(recorder.flush());
        recorder.watch().status()
    };
    assert_eq!((status.recorded, status.dropped, status.stopped), (2000, 0, None));
    recorder.close();
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    let kept = files(&dir);
    let bytes: u64 = kept.iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    assert!(bytes <= 400 << 10, "{bytes} bytes");
    assert!(kept.len() > 4, "{kept:?}");
    let recordings = open_all(&dir);
    let mut last = None;
    for (path, recording) in kept.iter().zip(&recordings) {
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        for row in recording.rows::<Dispatch>().unwrap() {
            let seq = row.unwrap().seq;
            assert!(last.is_none_or(|last| last + 1 == seq), "nothing is missing in between");
            last = Some(seq);
        }
    }
    assert_eq!(last, Some(1999), "the oldest went first");

    // A recorder that is started later counts what is there.
    let later = Recorder::start(RecorderSettings::new(dir.clone(), 0)).unwrap();
    later.close();
    assert_eq!(files(&dir).len(), 0);
}

#[test]
fn age_begins_a_new_file_and_so_does_another_policy() {
    let dir = folder("age");
    let recorder = Recorder::start(RecorderSettings { file_age_ms: 100.0, ..settings(&dir) }).unwrap();
    let mut drive = Drive::<Dispatch>::new(&recorder, native("output-first"), "output-first");
    let at = |seq: u64, now_ms: f64| {
        let mut row = dispatch_row(seq, 1);
        row.facts.now_ms = now_ms;
        row
    };
    for (seq, now_ms) in [0.0, 99.0, 100.0, 101.0].into_iter().enumerate() {
        drive.decide(&at(seq as u64, now_ms));
        assert!(recorder.flush());
    }
    drive.change(native("fcfs"), "fcfs");
    drive.decide(&at(4, 102.0));
    recorder.close();
    let read: Vec<(String, Vec<u64>)> = open_all(&dir)
        .iter()
        .map(|file| {
            let rows = file.rows::<Dispatch>().unwrap().map(|row| row.unwrap().seq).collect();
            (file.header().policy.version.source.clone(), rows)
        })
        .collect();
    let expected = [("native:output-first", vec![0, 1, 2]), ("native:output-first", vec![3]), ("native:fcfs", vec![4])];
    assert_eq!(read, expected.map(|(source, rows)| (source.to_owned(), rows)));
}

#[test]
fn a_folder_that_goes_stops_the_recording_and_nothing_else() {
    let dir = folder("gone");
    let recorder = Recorder::start(settings(&dir)).unwrap();
    let mut drive = Drive::<Dispatch>::new(&recorder, native("fcfs"), "fcfs");
    fs::remove_dir_all(&dir).unwrap();
    for seq in 0..5 {
        assert_eq!(drive.decide(&dispatch_row(seq, 2)), Asked::Decided);
    }
    assert!(!recorder.flush());
    assert_eq!(drive.decide(&dispatch_row(5, 2)), Asked::Decided);
    let watch = recorder.watch();
    recorder.close();
    let status = watch.status();
    assert_eq!((status.recorded, status.dropped), (0, 6));
    assert!(status.stopped.unwrap().contains("No such file"));
}

#[test]
fn a_folder_that_others_may_write_is_refused() {
    let dir = folder("open");
    fs::create_dir_all(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    let refused = Recorder::start(settings(&dir)).unwrap_err();
    assert!(refused.starts_with(&format!("{}: has mode 0777", dir.display())), "{refused}");
}

/// Before its columns are taken in, which are as large as the file says.
#[test]
fn more_candidates_than_are_recorded_are_refused() {
    let mut bytes = small_file();
    let counts: Vec<u8> = [2u32; 3].into_iter().flat_map(u32::to_le_bytes).collect();
    let place = bytes.windows(counts.len()).position(|window| window == counts).unwrap();
    bytes[place..place + 4].copy_from_slice(&16_385u32.to_le_bytes());
    let recording = Recording::read("x", bytes).unwrap();
    let error = recording.rows::<Dispatch>().unwrap().find_map(Result::err).unwrap();
    assert_eq!(error.to_string(), "x: row 0 of batch 0: candidates: 16385: expected at most 16384");
}

/// Answers with the number of its decisions, and hands `lead` more over than it has counted.
struct Counts {
    description: Description,
    count: u64,
    lead: u64,
}

impl Counts {
    fn leading_by(lead: u64) -> Box<dyn Policy> {
        Box::new(Self { description: Description::default(), count: 0, lead })
    }
}

impl Policy for Counts {
    fn description(&self) -> &Description {
        &self.description
    }

    fn inputs(&self) -> &[Column] {
        &[Column::Phase]
    }

    fn decide(&mut self, _: &Batch<'_>, decision: &mut Decision) -> Result<(), Fault> {
        self.count += 1;
        decision.token_budget = u32::try_from(self.count).ok();
        Ok(())
    }

    fn recover(&mut self) -> Result<(), Fault> {
        self.count = 0;
        Ok(())
    }

    fn snapshot(&mut self) -> Result<Vec<u8>, Fault> {
        Ok((self.count + self.lead).to_le_bytes().to_vec())
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Fault> {
        self.count = u64::from_le_bytes(state.try_into().map_err(|_| fault(FaultKind::Init))?);
        Ok(())
    }
}

/// Whoever was active returns before anybody was asked meanwhile, with a state that the other one has handed back.
#[test]
fn a_rollback_between_two_decisions_is_recorded() {
    let dir = folder("rollback");
    let recorder = Recorder::start(settings(&dir)).unwrap();
    let contender = |lead: u64| Contender::new(Counts::leading_by(lead), "", "counts");
    let mut slot = DispatchSlot::with_version(contender(0), recorded::TARGETS, StrikeLimits::default());
    let control = slot.control();
    control.record(recorder.tap(recorded::SETUP));
    let (table, live) = made::table(3);
    let mut decide = || {
        for now_ms in [0.0, 1.0, 2.0] {
            slot.decide(&made::step(now_ms, 3), &table, &live, 16);
        }
    };
    decide();
    control.swap(contender(100));
    control.rollback().unwrap();
    decide();
    recorder.close();
    let mut start = || Ok(Counts::leading_by(0));
    let report = replay::<Dispatch>(&open_all(&dir), ReplayOptions::default(), &mut start, &mut |_| ()).unwrap();
    assert_eq!((report.identical, report.different, report.gaps), (6, 0, 0), "{:?}", report.differences);
}

/// Process ids say nothing where each engine of a folder counts its own: what is being written is locked.
#[test]
fn what_another_recorder_writes_is_left_alone() {
    let dir = folder("shared");
    let writes = || {
        let recorder = Recorder::start(settings(&dir)).unwrap();
        Drive::<Dispatch>::new(&recorder, native("fcfs"), "fcfs").decide(&dispatch_row(0, 2));
        assert!(recorder.flush());
        recorder
    };
    let keep_nothing = || Recorder::start(RecorderSettings::new(dir.clone(), 0)).unwrap().close();
    let (one, other) = (writes(), writes());
    let both = files(&dir);
    assert_eq!(both.len(), 2);
    keep_nothing();
    assert_eq!(files(&dir), both);
    other.close();
    keep_nothing();
    assert_eq!(files(&dir).len(), 1);
    one.close();
    keep_nothing();
    assert_eq!(files(&dir).len(), 0);
}

#[test]
fn what_is_no_recording_is_refused_with_what_was_expected() {
    let refused = |bytes: &[u8]| Recording::read("x", bytes.to_vec()).unwrap_err().to_string();
    assert_eq!(refused(b""), "x: expected an Arrow IPC file, which begins with ARROW1");
    assert_eq!(refused(b"ARROW1\0\0"), "x: it is cut off in the message at byte 8");
    let recording = Recording::read("x", small_file()).unwrap();
    assert_eq!(recording.rows::<Budget>().unwrap_err().to_string(), "x: it is of slot dispatch, expected budget");
}
