//! Recordings: any bytes, and edits of files that a recorder wrote. They are read to the end or refused in one line, and
//! what was read is decided again.

use meridian_core::{Budget, Dispatch, Eviction, native};
use meridian_engine::recording::{
    MAX_CANDIDATES, Recordable, Recorded, Recording, ReplayOptions, ReplayReport, replay, retrace,
};
use meridian_engine::timeline::chrome_json;

use crate::bytes::Bytes;

/// An input that begins with this is a list of edits, the first of which says of which base.
pub const EDITS: &[u8] = b"EDIT";

/// A recording of each slot; `target/release/examples/recordings host/fuzz/corpus/recording` writes them anew.
pub const BASES: [&[u8]; 3] = [
    include_bytes!("../corpus/recording/dispatch.arrow"),
    include_bytes!("../corpus/recording/eviction.arrow"),
    include_bytes!("../corpus/recording/budget.arrow"),
];

const MAX_EDITS: usize = 64;
/// Values on which lengths, offsets and numbers of decisions turn.
const NUMBERS: [u64; 10] = [0, 1, 2, 8, 255, 16_385, u32::MAX as u64 >> 1, u32::MAX as u64, u64::MAX >> 1, u64::MAX];

/// Read `data`, or the edited base.
pub fn run(data: &[u8]) {
    match data.strip_prefix(EDITS) {
        Some(edits) => read(edited(edits)),
        None => read(data.to_vec()),
    }
}

fn read(bytes: Vec<u8>) {
    let recording = match Recording::read("a.arrow", bytes) {
        Ok(recording) => recording,
        Err(error) => return crate::assert_one_line(&error.to_string()),
    };
    if let Some(why) = recording.cut() {
        crate::assert_one_line(why);
    }
    match retrace(std::slice::from_ref(&recording), &[1]) {
        Ok(retraced) => {
            assert!(chrome_json(&retraced.timeline).ends_with("]}\n"));
        }
        Err(error) => crate::assert_one_line(&error.to_string()),
    }
    rows::<Dispatch>(&recording);
    rows::<Eviction>(&recording);
    rows::<Budget>(&recording);
}

/// Read the rows as those of slot `K`, and decide them again.
fn rows<K: Recordable>(recording: &Recording) {
    let mut rows = match recording.rows::<K>() {
        Ok(rows) => rows,
        Err(error) => return crate::assert_one_line(&error.to_string()),
    };
    assert_eq!(recording.slot(), K::NAME);
    let columns = rows.columns().count();
    let (mut count, mut last, mut row) = (0, None, Recorded::<K>::default());
    let is_whole = loop {
        match rows.next_into(&mut row) {
            Ok(true) => {}
            Ok(false) => break true,
            Err(error) => {
                crate::assert_one_line(&error.to_string());
                break false;
            }
        }
        count += 1;
        assert!(row.candidates <= MAX_CANDIDATES);
        assert_eq!(row.columns.len(), columns * row.candidates);
        assert!(K::check(&row.facts, &row.decision, row.candidates).is_ok(), "{row:?}");
        assert!(last.replace(row.seq).is_none_or(|last| last < row.seq), "decision {} comes again", row.seq);
    };
    assert_eq!(rows.next_into(&mut row), Ok(false), "more rows after the end");
    assert!(count <= recording.row_count(), "{count} rows, and {} are told", recording.row_count());
    for name in K::NATIVES {
        decide::<K>(recording, name, count, is_whole);
    }
}

fn decide<K: Recordable>(recording: &Recording, name: &str, rows: u64, is_whole: bool) {
    let policy = &recording.header().policy;
    let targets = policy.targets.into_targets();
    // The options may be another policy's.
    let is_its_own = native::policy::<K>(name, targets, &policy.options).is_ok();
    let options = if is_its_own { &policy.options } else { "{}" };
    let mut start = || native::policy::<K>(name, targets, options).map_err(|error| error.to_string());
    let report = match replay(std::slice::from_ref(recording), ReplayOptions::default(), &mut start, &mut |_| ()) {
        Ok(report) => report,
        Err(error) => return crate::assert_one_line(&error.to_string()),
    };
    let ReplayReport { decisions, identical, different, not_compared, first_fault, differences, .. } = report;
    assert!(is_whole, "what does not read was replayed");
    assert_eq!(decisions, rows);
    assert_eq!(identical + different + not_compared, decisions);
    first_fault.iter().for_each(|fault| crate::assert_one_line(fault));
    for difference in &differences {
        crate::assert_one_line(&difference.recorded);
        crate::assert_one_line(&difference.replayed);
    }
}

/// The base that the first byte names, changed. Lengths and offsets are aligned, so an edit's place is a multiple of 4.
fn edited(edits: &[u8]) -> Vec<u8> {
    let mut edits = Bytes::new(edits);
    let mut bytes = BASES[usize::from(edits.u8()) % BASES.len()].to_vec();
    for _ in 0..MAX_EDITS {
        if edits.is_empty() {
            break;
        }
        let (kind, place, value) = (edits.u8(), edits.below(bytes.len()), edits.u16());
        let aligned = place / 4 * 4;
        let number = NUMBERS[usize::from(value) % NUMBERS.len()].to_le_bytes();
        match kind % 8 {
            0 => bytes[place] = value as u8,
            1 => write(&mut bytes, aligned, &number[..4]),
            2 => write(&mut bytes, aligned / 8 * 8, &number),
            3 => write(&mut bytes, aligned, &u32::from(value).to_le_bytes()),
            4 => write(&mut bytes, aligned / 8 * 8, &u64::from(value).to_le_bytes()),
            5 => {
                // The same again, elsewhere: offsets and lengths of other tables and buffers.
                let from = usize::from(value) * 4 % bytes.len();
                let copied = bytes[from..bytes.len().min(from + 16)].to_vec();
                write(&mut bytes, aligned, &copied);
            }
            6 => bytes[place] ^= 1 << (value % 8),
            _ if value % 8 == 0 => {
                bytes.truncate(place + 1);
                break;
            }
            _ => {}
        }
    }
    bytes
}

fn write(bytes: &mut [u8], place: usize, value: &[u8]) {
    for (byte, value) in bytes.iter_mut().skip(place).zip(value) {
        *byte = *value;
    }
}
