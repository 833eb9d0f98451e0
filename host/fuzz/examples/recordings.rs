//! Writes a small recording of each slot into a folder, as a recorder writes them: the bases of the fuzz target `recording`.
//!
//!     cargo build --release --workspace --examples && target/release/examples/recordings host/fuzz/corpus/recording

use std::path::Path;
use std::time::Duration;

use meridian_core::budget::{Load, Point, Verdict};
use meridian_core::slot::{Version, Witness};
use meridian_core::{
    Asked, Batch, Budget, BudgetDecision, Decision, Dispatch, Eviction, Fault, FaultKind, GuardedPolicy, Memory,
    MeridianConfig, Ranking, Step, native,
};
use meridian_engine::recording::{Recordable, Recorder, RecorderSettings, SlotSetup};

fn main() {
    let folder = std::env::args().nth(1).expect("usage: recordings FOLDER");
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder).expect("the folder can be made");
    let keys = |candidates: usize| (0..candidates).map(|i| i as f32).collect::<Vec<_>>();
    write::<Dispatch>(folder, Step { token_budget: 2048, running: 3, ..Step::default() }, |candidates| Decision {
        keys: keys(candidates),
        token_budget: Some(512),
        token_caps: vec![7; candidates],
        victim_keys: Vec::new(),
    });
    write::<Eviction>(folder, Memory { free_blocks: 5, total_blocks: 64, ..Memory::default() }, |candidates| Ranking {
        keys: keys(candidates),
        keep_ms: Vec::new(),
    });
    write::<Budget>(folder, Load { point: Point::Start, thinking: 2, ..Load::default() }, |candidates| {
        BudgetDecision { thresholds: vec![Load::default().configured; candidates], verdicts: Vec::<Verdict>::new() }
    });
}

/// Two batches: every outcome, and batches of no, one and three candidates.
fn write<K: Recordable>(folder: &Path, facts: K::Facts, answer: impl Fn(usize) -> K::Decision) {
    let dir = std::env::temp_dir().join(format!("meridian-{}-{}", K::NAME.label(), std::process::id()));
    let settings = RecorderSettings { batch_age: Duration::from_secs(3600), ..RecorderSettings::new(dir.clone(), 64) };
    let recorder = Recorder::start(settings).expect("the folder can be recorded into");
    let targets = MeridianConfig::default().scheduler.targets();
    let mut tap = recorder.tap::<K>(SlotSetup { targets, deadline_ms: 2.0, memory_mib: 64 });
    let name = K::NATIVES[0];
    let version =
        Version { name: name.into(), version: "1".into(), source: format!("native:{name}"), ..Version::default() };
    let mut seat = GuardedPolicy::<K>::new(native::policy(name, targets, "{}").expect("a native default starts"));
    let faulted = |faults| Asked::Faulted(faults);
    for (candidates, asked) in [
        (3, Asked::Decided),
        (0, Asked::Decided),
        (1, Asked::LeftToDefault),
        (1, faulted(vec![Fault::new(FaultKind::BadAnswer, "made up")])),
        (1, faulted(Vec::new())),
        (3, Asked::Decided),
    ] {
        tap.before(0, &version, &mut seat);
        let decision = if asked == Asked::Decided { answer(candidates) } else { K::Decision::default() };
        let fill = |inputs: &[K::Column], out: &mut Vec<f32>| {
            out.clear();
            out.extend((0..inputs.len() * candidates).map(|i| i as f32));
        };
        let batch = Batch { facts: &facts, candidates, columns: &[], finished: &[7, 1 << 23] };
        tap.after(&batch, &fill, &asked, &decision);
        if candidates == 0 {
            assert!(recorder.flush(), "the batch is written");
        }
    }
    recorder.close();
    let mut files = std::fs::read_dir(&dir).expect("the recorder made the folder");
    let file = files.next().expect("one file").expect("it can be named").path();
    std::fs::copy(file, folder.join(format!("{}.arrow", K::NAME.label()))).expect("it can be copied");
    std::fs::remove_dir_all(&dir).expect("nobody else is in it");
}
