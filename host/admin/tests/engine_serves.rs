//! An engine that starts its listeners.

use meridian_core::{MeridianConfig, SlotName};
use meridian_engine::control::{Given, Mode, Upload};
use meridian_engine::{DataParallel, Engine, Settings};

#[test]
fn an_engine_says_its_rank_and_its_own_changes_are_audited() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("engine-audit");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let toml = "[telemetry]\nprometheus = ''\n[admin]\nlisten = ''\naudit_log = 'audit-{rank}.jsonl'\n";
    let config = MeridianConfig::from_toml(toml).unwrap();
    let dp = Some(DataParallel { rank: 3, size: None });
    let settings = Settings { base_dir: folder.clone(), dp, serve: Some(meridian_admin::serve), ..Settings::default() };
    let engine = Engine::start(config, settings).unwrap();
    let fcfs = Upload { policy: Given::Native("fcfs"), options: None, source: "native:fcfs" };
    assert_eq!((engine.control().status().dp_rank, engine.control().status().dp_size), (Some(3), None));
    engine.swap(SlotName::Dispatch, &fcfs, Mode::Active).unwrap();
    engine.control().rollback(SlotName::Dispatch).unwrap();
    let text = std::fs::read_to_string(folder.join("audit-3.jsonl")).unwrap();
    let lines: Vec<_> = text.lines().collect();
    let [swap, rollback] = lines.as_slice() else { panic!("{text}") };
    assert!(swap.contains(r#""who":"in process""#) && swap.contains(r#""asked":"native:fcfs""#), "{swap}");
    assert!(rollback.contains(r#""action":"rollback""#) && rollback.contains(r#""dp_rank":3"#), "{rollback}");
}
