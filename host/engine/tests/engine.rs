//! An engine from its start to its end, driven as an embedder would.

use meridian_core::config::{PolicyConfig, SlotMode};
use meridian_core::{
    EngineFacts, Error, KvGrowth, LeavingBlock, Markers, MeridianConfig, NewRequest, SlotName, Stop, ThinkPhase,
};
use meridian_engine::control::{Given, Mode, Upload};
use meridian_engine::{Engine, EngineError, Settings};

const FCFS: Upload<'static> = Upload { policy: Given::Native("fcfs"), options: None, source: "native:fcfs" };
const FACTS: EngineFacts = EngineFacts {
    now_ms: 0.0,
    token_budget: 64,
    free_blocks: 0,
    total_blocks: 0,
    free_seats: 4,
    waiting: 0,
    decode_tokens: 1,
};

fn started(config: MeridianConfig) -> Result<Engine, EngineError> {
    let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![]).expect("usable markers");
    Engine::start(config, Settings { markers, ..Settings::default() })
}

#[test]
fn a_policy_that_is_not_there_is_named_with_its_field() {
    let mut config = MeridianConfig::default();
    config.policy.eviction.source = "not-there.wasm".into();
    let error = started(config).err().unwrap().to_string();
    assert!(error.starts_with("policy.eviction.source: ./not-there.wasm: cannot read"), "{error}");
}

#[test]
fn a_configuration_that_no_file_could_hold_is_refused() {
    let mut config = MeridianConfig::default();
    config.policy.dispatch.deadline_ms = -1.0;
    let error = started(config).err().unwrap().to_string();
    assert!(error.starts_with("policy.dispatch.deadline_ms: -1"), "{error}");
}

#[test]
fn a_row_is_its_requests_alone() {
    let engine = started(MeridianConfig::default()).unwrap();
    let mut driver = engine.drive();
    let request = NewRequest { prompt: &[1, 7], ..NewRequest::default() };
    let first = driver.arrived("a", &request, None).unwrap().row;
    assert!(matches!(driver.arrived("a", &request, None), Err(Error::DuplicateRequest { .. })));
    assert_eq!(driver.finished("a", "stop"), Some(first));
    assert_eq!(driver.finished("a", "stop"), None);
    let second = driver.arrived("a", &request, None).unwrap().row;
    assert_ne!(first, second);
    assert!(driver.request(first).is_none() && driver.request(second).is_some());
    driver.generated(&[(first, 8)]);
    assert_eq!(driver.request(second).unwrap().think_tokens(), 0);
}

#[test]
fn tokens_move_a_request_through_its_phases() {
    let engine = started(MeridianConfig::default()).unwrap();
    let mut driver = engine.drive();
    let row = driver.arrived("a", &NewRequest { prompt: &[1, 7], ..NewRequest::default() }, None).unwrap().row;
    let phase = |driver: &mut meridian_engine::Driver| driver.request(row).unwrap().phase();
    assert_eq!(phase(&mut driver), ThinkPhase::Prefill);
    driver.plan(&FACTS, &[], &[row]);
    driver.admitted(row, 0);
    driver.scheduled(FACTS.now_ms, &[(row, 2)], 0);
    driver.generated(&[(row, 40)]);
    assert_eq!(phase(&mut driver), ThinkPhase::Think);
    driver.generated(&[(row, 8), (row, 41)]);
    assert_eq!(phase(&mut driver), ThinkPhase::Output);
    assert!(!driver.preempted(row, 3), "nobody thinks who could have gone in its place");
    assert_eq!(driver.scheduler().mirror().preemptions(), [0, 0, 1]);
}

#[test]
fn an_engine_is_stock_while_fcfs_decides_and_nothing_else_was_asked_for() {
    let mut config = MeridianConfig::default();
    config.policy.dispatch.source = "native:fcfs".into();
    let engine = started(config).unwrap();
    assert!(engine.drive().is_stock());
    let other = Upload { policy: Given::Native("srpt"), options: None, source: "native:srpt" };
    engine.swap(SlotName::Dispatch, &other, Mode::Active).unwrap();
    assert!(!engine.drive().is_stock());
    engine.control().rollback(SlotName::Dispatch).unwrap();
    assert!(engine.drive().is_stock());
}

#[test]
fn an_engine_with_policies_in_shadow_is_stock_until_one_is_promoted() {
    let mut config = MeridianConfig::default();
    let PolicyConfig { dispatch, eviction, budget, .. } = &mut config.policy;
    for (slot, source) in [(dispatch, "native:balanced"), (eviction, "native:ttl"), (budget, "native:deer")] {
        slot.source = source.into();
        slot.mode = SlotMode::Shadow;
    }
    let engine = started(config).unwrap();
    let active = || engine.control().status().slots.into_iter().map(|slot| slot.active.source).collect::<Vec<_>>();
    assert_eq!(active(), ["native:fcfs", "native:tiered-lru", "native:eat-rpdi"]);
    assert!(engine.drive().is_stock());
    engine.control().promote(SlotName::Dispatch).unwrap();
    assert_eq!(active()[0], "native:balanced");
    assert!(!engine.drive().is_stock());
    engine.control().rollback(SlotName::Dispatch).unwrap();
    assert!(engine.drive().is_stock());
}

#[test]
fn a_swap_loses_no_request_and_none_comes_after_the_end() {
    let engine = started(MeridianConfig::default()).unwrap();
    let rows: Vec<_> = (0..8)
        .map(|number| engine.drive().arrived(&number.to_string(), &NewRequest::default(), None).unwrap().row)
        .collect();
    engine.swap(SlotName::Dispatch, &FCFS, Mode::Active).unwrap();
    assert!(rows.iter().all(|row| engine.drive().request(*row).is_some()));
    assert_eq!(engine.control().status().requests.iter().sum::<u64>(), 8);
    engine.shutdown();
    assert!(engine.swap(SlotName::Dispatch, &FCFS, Mode::Active).is_err());
    // The policies that it has go on.
    assert_eq!(engine.drive().plan(&FACTS, &[], &rows).token_budget, 64);
}

#[test]
fn a_request_that_the_engine_lost_without_a_word_is_forgotten() {
    let engine = started(MeridianConfig::default()).unwrap();
    let mut driver = engine.drive();
    let [kept, lost] = ["kept", "lost"].map(|id| driver.arrived(id, &NewRequest::default(), None).unwrap().row);
    let has = |id: &str| id == "kept";
    assert!(driver.reap(0.0, has).is_empty(), "it was heard of just now");
    let after = |now_ms| EngineFacts { now_ms, ..FACTS };
    driver.plan(&after(30_000.0), &[], &[kept, lost]);
    assert!(driver.reap(30_000.0, has).is_empty(), "a minute has not passed");
    driver.plan(&after(70_000.0), &[], &[kept, lost]);
    assert_eq!(driver.reap(70_000.0, has), [lost]);
    assert_eq!((driver.find("kept"), driver.find("lost")), (Some(kept), None));
    assert!(driver.request(lost).is_none());
    // Its id is free again, and who is there stays however long it waits.
    driver.arrived("lost", &NewRequest { arrival_ms: 70_000.0, ..NewRequest::default() }, None).unwrap();
    driver.plan(&after(7_000_000.0), &[], &[kept]);
    assert!(driver.reap(7_000_000.0, |_| true).is_empty());
}

/// Whether the default policy holds a session that has no KV blocks, for the sake of one that has 600 of 1,000.
fn is_held(has_connector: bool) -> bool {
    const BLOCKS: u32 = 1000;
    let engine = started(MeridianConfig::default()).expect("the defaults are valid");
    let mut driver = engine.drive();
    driver.keep_answers_ahead(KvGrowth::default());
    let pool = driver.add_pool(BLOCKS, 16, has_connector);
    driver.pool(pool).resync((0..BLOCKS).map(|block| (block, None)));
    let mut arrives = |id: &str, session, prompt_tokens| {
        let request = NewRequest { prompt_tokens, max_tokens: 1000, session, ..NewRequest::default() };
        driver.arrived(id, &request, None).expect("a new request").row
    };
    let (decodes, warm, cold) = (arrives("decodes", "", 1), arrives("warm", "a", 1 << 20), arrives("cold", "b", 8000));
    // How long a chain is warm depends on what its tokens take to compute again, so steps have to be known: 10 ms and 0.1 ms
    // for a token of a prompt.
    let mut now_ms = 0.0;
    for step in 0..100u32 {
        let tokens = if step % 4 == 0 { 60 } else { 0 };
        driver.plan(&EngineFacts { now_ms, ..FACTS }, &[decodes, warm], &[]);
        if step == 0 {
            driver.admitted(decodes, 0);
            driver.admitted(warm, 0);
        }
        driver.scheduled(now_ms, &[(decodes, 1), (warm, tokens)], 0);
        now_ms += 10.0 + 0.1 * f64::from(tokens);
        driver.scheduler().mirror().hold_time(now_ms);
        driver.generated(&[(decodes, 5)]);
    }
    let chain: Vec<u32> = (0..600).collect();
    driver.pool(pool).taken(&chain, now_ms);
    driver.chain_ends("warm", Stop::Turn, &[(pool, chain)]);
    let leaving: Vec<LeavingBlock> =
        (0..600).rev().map(|block| LeavingBlock { block, tokens: Some((block + 1) * 16) }).collect();
    driver.leaving(pool, &leaving, now_ms);
    driver.finished("warm", "stop");
    let facts = EngineFacts { now_ms, free_blocks: BLOCKS - 1, total_blocks: BLOCKS, waiting: 1, ..FACTS };
    driver.plan(&facts, &[decodes], &[cold]).token_caps.contains(&(cold, 0))
}

#[test]
fn no_session_waits_for_kv_memory_where_a_connector_may_load_its_kv() {
    assert!(is_held(false));
    assert!(!is_held(true));
}
